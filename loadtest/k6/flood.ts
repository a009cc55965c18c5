// What is admitted of one tenant that asks far more often than its limit allows?
//
// Fails if it is more than capacity + rate * time + slack, if it is less than SHARE of capacity + rate * time, if
// nothing was refused (then it was no flood), if a header is not as promised, or if p99 is too high.
//
//   BASE_URL        the gateway (http://127.0.0.1:8080)
//   RATE            requests a second (5000)
//   DURATION        for how long (1m)
//   SHARE           the share of the ideal that has to be admitted (0.95)
//   P99_MS          the p99 of a request that is still good, at the client (25)
//   VUS             the most requests at once (200)
//   FLOOD_CAPACITY  the limit, as in gateway.yaml (1000)
//   FLOOD_REFILL    what comes back a second (500)
//   EPSILON         what gateways may hold in leases, as in gateway.yaml (0.05)
import http from 'k6/http';
import { admits } from './answers.ts';
import { least, most, secondsOf, slack } from './ideal.ts';
import { arrivals, mostDropped, options as withPromises, window } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const RATE = number('RATE', 5000);
const DURATION = text('DURATION', '1m');
const SHARE = number('SHARE', 0.95);
const LIMIT = { capacity: number('FLOOD_CAPACITY', 1000), rate: number('FLOOD_REFILL', 500) };
const SLACK = slack(LIMIT, number('EPSILON', 0.05));

export const options = withPromises(
  { flood: arrivals(RATE, DURATION) },
  {
    admitted: [
      `count<=${most(LIMIT, window(DURATION), SLACK)}`,
      `count>=${least(LIMIT, secondsOf(DURATION), SHARE)}`,
    ],
    refused: ['count>0'],
    dropped_iterations: [mostDropped(RATE, DURATION)],
  },
);

export function setup(): Run {
  return begin(`${BASE_URL}/flood`, [LIMIT.capacity]);
}

export default function (run: Run): void {
  admits(http.get(`${BASE_URL}/flood`, as(`flood-${run.name}`)));
}

export const handleSummary = reporter('flood', 'What is admitted of one tenant far over its limit?');
