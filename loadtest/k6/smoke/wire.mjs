// Requests over sockets that are kept open, as k6 sends them.
import http from 'node:http';
import { milliseconds } from './durations.mjs';

const agent = new http.Agent({ keepAlive: true });

/** Sends all at the same time; then wakes the VU that waits for the answers. */
export async function exchange({ requests, done, port }) {
  port.postMessage(await Promise.all(requests.map(send)));
  Atomics.store(done, 0, 1);
  Atomics.notify(done, 0);
}

/** An answer; without one the status is 0, as in k6. */
function send({ method, url, body, headers, timeout }) {
  const started = performance.now();
  const answer = (status, fields) => {
    return { status, error: '', headers: {}, body: null, ...fields, duration: performance.now() - started };
  };
  return new Promise((resolve) => {
    const failed = (error) => resolve(answer(0, { error: error.message }));
    const request = http.request(url, { method, agent, headers }, (response) => {
      const chunks = [];
      response.on('data', (chunk) => chunks.push(chunk));
      response.on('error', failed);
      response.on('end', () => {
        const headers = named(response.rawHeaders);
        resolve(answer(response.statusCode, { headers, body: Buffer.concat(chunks).toString() }));
      });
    });
    request.setTimeout(milliseconds(timeout), () => request.destroy(new Error('timeout')));
    request.on('error', failed);
    request.end(body);
  });
}

/** k6 writes names as Go does: X-Ratelimit-Limit. */
function named(raw) {
  const headers = {};
  for (let at = 0; at < raw.length; at += 2) {
    const name = raw[at].toLowerCase().replace(/(^|-)[a-z]/g, (start) => start.toUpperCase());
    headers[name] = name in headers ? `${headers[name]}, ${raw[at + 1]}` : raw[at + 1];
  }
  return headers;
}

export function close() {
  agent.destroy();
}
