// Do many tenants that keep to their limits ever notice them?
//
// TENANTS tenants ask in turn, each less often than its limit allows. Fails if one of them is refused, if a header is
// not as promised, or if p99 is too high.
//
//   BASE_URL         the gateway (http://127.0.0.1:8080)
//   TENANTS          how many (1000)
//   RATE             requests a second of all of them (5000)
//   DURATION         for how long (1m)
//   P99_MS           the p99 of a request that is still good, at the client (25)
//   VUS              the most requests at once (200)
//   STEADY_CAPACITY  the limit of each tenant, as in gateway.yaml (20)
//   STEADY_REFILL    what comes back a second (10)
import exec from 'k6/execution';
import http from 'k6/http';
import { admits } from './answers.ts';
import { arrivals, mostDropped, options as withPromises } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const TENANTS = number('TENANTS', 1000);
const RATE = number('RATE', 5000);
const DURATION = text('DURATION', '1m');

// Else tenants are refused for good reasons.
if (RATE / TENANTS > number('STEADY_REFILL', 10)) throw new Error('RATE is over the limit of TENANTS tenants');

export const options = withPromises(
  { steady: arrivals(RATE, DURATION) },
  { refused: ['count==0'], dropped_iterations: [mostDropped(RATE, DURATION)] },
);

export function setup(): Run {
  return begin(`${BASE_URL}/steady`, [number('STEADY_CAPACITY', 20)]);
}

export default function (run: Run): void {
  const tenant = exec.scenario.iterationInTest % TENANTS;
  admits(http.get(`${BASE_URL}/steady`, as(`steady-${run.name}-${tenant}`)));
}

export const handleSummary = reporter('steady', 'Do tenants that keep to their limits ever notice them?');
