// Does one hot tenant slow down the others, or itself?
//
// One tenant asks RATE times a second, below its limit; OTHERS tenants ask now and then. Fails if anybody is refused,
// if a header is not as promised, or if the p99 of the hot tenant or of the others is too high.
//
//   BASE_URL      the gateway (http://127.0.0.1:8080)
//   RATE          requests a second of the hot tenant (5000)
//   OTHERS        how many other tenants (100)
//   OTHERS_RATE   requests a second of all of them (200)
//   DURATION      for how long (1m)
//   P99_MS        the p99 of a request that is still good, at the client (25)
//   VUS           the most requests at once in each scenario (200)
//   HOT_CAPACITY  the limit of each tenant, as in gateway.yaml (20000)
//   HOT_REFILL    what comes back a second (20000)
import exec from 'k6/execution';
import http from 'k6/http';
import { admits } from './answers.ts';
import { arrivals, FAST, mostDropped, options as withPromises } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const RATE = number('RATE', 5000);
const OTHERS = number('OTHERS', 100);
const OTHERS_RATE = number('OTHERS_RATE', 200);
const DURATION = text('DURATION', '1m');

if (RATE > number('HOT_REFILL', 20000)) throw new Error('RATE is over the limit');

export const options = withPromises(
  { hot: arrivals(RATE, DURATION, 'hot'), others: arrivals(OTHERS_RATE, DURATION, 'others') },
  {
    refused: ['count==0'],
    'http_req_duration{scenario:hot}': [FAST],
    'http_req_duration{scenario:others}': [FAST],
    dropped_iterations: [mostDropped(RATE + OTHERS_RATE, DURATION)],
  },
);

export function setup(): Run {
  return begin(`${BASE_URL}/hot`, [number('HOT_CAPACITY', 20000)]);
}

export function hot(run: Run): void {
  admits(http.get(`${BASE_URL}/hot`, as(`hot-${run.name}`)));
}

export function others(run: Run): void {
  admits(http.get(`${BASE_URL}/hot`, as(`other-${run.name}-${exec.scenario.iterationInTest % OTHERS}`)));
}

export const handleSummary = reporter('hot', 'Does one hot tenant slow down the others, or itself?');
