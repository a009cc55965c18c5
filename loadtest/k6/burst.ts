// Does a full bucket let a burst through, and is a client admitted that waits as long as it was told?
//
// Each iteration is a new tenant. It asks until it is refused, waits for Retry-After, asks once, waits until the bucket
// is full by X-RateLimit-Reset, and asks once more. Fails if the burst is not the capacity and what came back
// meanwhile, if it is refused after either wait, if a header is not as promised, or if p99 is too high.
//
//   BASE_URL        the gateway (http://127.0.0.1:8080)
//   CLIENTS         clients at once (50)
//   BURSTS          bursts of each (5)
//   P99_MS          the p99 of a request that is still good, at the client (25)
//   BURST_CAPACITY  the limit of each tenant, as in gateway.yaml (20)
//   BURST_REFILL    what comes back a second (10)
import { check, sleep } from 'k6';
import exec from 'k6/execution';
import http from 'k6/http';
import { Rate } from 'k6/metrics';
import { admits, retryAfter, told, type Answer } from './answers.ts';
import { most } from './ideal.ts';
import { options as withPromises } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number } from './settings.ts';

const LIMIT = { capacity: number('BURST_CAPACITY', 20), rate: number('BURST_REFILL', 10) };
const URL = `${BASE_URL}/burst`;

const admittedAfterWait = new Rate('admitted_after_wait');

export const options = withPromises(
  {
    burst: {
      executor: 'per-vu-iterations',
      vus: number('CLIENTS', 50),
      iterations: number('BURSTS', 5),
      maxDuration: '10m',
    },
  },
  { admitted_after_wait: ['rate==1'], refused: ['count>0'] },
);

export function setup(): Run {
  return begin(URL, [LIMIT.capacity]);
}

export default function (run: Run): void {
  const params = as(`burst-${run.name}-${exec.scenario.iterationInTest}`);
  const ask = () => http.get(URL, params);

  const refusal = burst(ask);
  sleep(retryAfter(refusal) || 1);
  const after = ask();
  admittedAfterWait.add(admits(after));

  sleep(told(after, 'Reset') || 1);
  const full = ask();
  admittedAfterWait.add(admits(full));
  check(full, { 'the bucket is full after Reset': () => told(full, 'Remaining') === LIMIT.capacity - 1 });
}

/** Asks until it is refused; the refusal. */
function burst(ask: () => Answer): Answer {
  const started = Date.now();
  let taken = 0;
  let answer = ask();
  while (admits(answer) && taken < 100 * LIMIT.capacity) {
    taken += 1;
    answer = ask();
  }
  const seconds = (Date.now() - started) / 1000;
  check(answer, {
    'the burst is the capacity and what came back': () =>
      taken >= LIMIT.capacity && taken <= most(LIMIT, seconds, 1),
  });
  return answer;
}

export const handleSummary = reporter('burst', 'Is a client admitted that waits as long as it was told?');
