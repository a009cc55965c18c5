#!/usr/bin/env node
// An upstream for the scripts: 200, and 401 to POST /login. PORT says where; 0 or nothing is any free port, and the one
// that it got is printed.
import http from 'node:http';

const server = http.createServer((request, response) => {
  request.resume();
  response.statusCode = request.method === 'POST' && request.url === '/login' ? 401 : 200;
  response.end('hello\n');
});
// A gateway must not find a connection closed that it is about to use.
server.keepAliveTimeout = 300_000;
server.listen(Number(process.env.PORT || 0), '127.0.0.1', () => console.log(server.address().port));
