// k6/http: get, post, batch.
import { onlyKnown, strict } from '../strict.mjs';
import { exchange, sample, vu } from '../vu-state.mjs';

export function get(url, params) {
  return send([['GET', url, null, params]])[0];
}

export function post(url, body, params) {
  return send([['POST', url, body, params]])[0];
}

/** Of an array, or of an object with names, as k6 takes both. */
export function batch(requests) {
  const answers = send(Object.values(requests));
  if (Array.isArray(requests)) return answers;
  return Object.fromEntries(Object.keys(requests).map((name, index) => [name, answers[index]]));
}

function send(requests) {
  if (vu.phase === 'init') throw new Error('requests are not possible in the init context');
  return exchange(requests.map(wire)).map((answer, index) => received(answer, requests[index][3]));
}

function wire([method, url, body, params = {}]) {
  onlyKnown('params', params, ['headers', 'tags', 'timeout']);
  if (body !== null && body !== undefined && typeof body !== 'string') {
    throw new Error('the stand-in knows only strings as bodies');
  }
  return { method, url, body: body ?? '', headers: params.headers ?? {}, timeout: params.timeout ?? '60s' };
}

function received(answer, params = {}) {
  const tags = { status: String(answer.status), ...params.tags };
  sample('http_reqs', 1, tags);
  sample('http_req_duration', answer.duration, tags);
  return strict('response', {
    status: answer.status,
    error: answer.error,
    headers: answer.headers,
    body: answer.body,
    timings: strict('timings', { duration: answer.duration }),
    json() {
      if (answer.body === null) throw new Error('the body is null, so there is no JSON in it');
      return JSON.parse(answer.body);
    },
  });
}

export default strict('http', { get, post, batch });
