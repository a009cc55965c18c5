// Do two gateways hold one tenant to one limit?
//
// Each iteration asks both at the same time. Fails if together they admit more than capacity + rate * time + slack, or
// less than SHARE of capacity + rate * time, if one of them admits nothing, if a header is not as promised, or if p99
// is too high.
//
//   BASE_URL         one gateway (http://127.0.0.1:8080)
//   BASE_URL_2       the other, on the same Redis (http://127.0.0.1:8081)
//   RATE             requests a second to each (2000)
//   DURATION         for how long (1m)
//   SHARE            the share of the ideal that has to be admitted (0.95)
//   P99_MS           the p99 of a request that is still good, at the client (25)
//   VUS              the most iterations at once (200)
//   SHARED_CAPACITY  the limit, as in gateway.yaml (2000)
//   SHARED_REFILL    what comes back a second (1000)
//   EPSILON          what gateways may hold in leases, as in gateway.yaml (0.05)
import http from 'k6/http';
import { admits } from './answers.ts';
import { least, most, secondsOf, slack } from './ideal.ts';
import { arrivals, mostDropped, options as withPromises, window } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const FIRST = `${BASE_URL}/shared`;
const SECOND = `${text('BASE_URL_2', 'http://127.0.0.1:8081')}/shared`;
const RATE = number('RATE', 2000);
const DURATION = text('DURATION', '1m');
const SHARE = number('SHARE', 0.95);
const LIMIT = { capacity: number('SHARED_CAPACITY', 2000), rate: number('SHARED_REFILL', 1000) };
const SLACK = slack(LIMIT, number('EPSILON', 0.05));

export const options = withPromises(
  { both: arrivals(RATE, DURATION) },
  {
    admitted: [
      `count<=${most(LIMIT, window(DURATION), SLACK)}`,
      `count>=${least(LIMIT, secondsOf(DURATION), SHARE)}`,
    ],
    'admitted{gateway:first}': ['count>0'],
    'admitted{gateway:second}': ['count>0'],
    refused: ['count>0'],
    dropped_iterations: [mostDropped(RATE, DURATION)],
  },
);

export function setup(): Run {
  begin(SECOND, [LIMIT.capacity]);
  return begin(FIRST, [LIMIT.capacity]);
}

export default function (run: Run): void {
  const params = as(`shared-${run.name}`);
  const { first, second } = http.batch({
    first: ['GET', FIRST, null, params],
    second: ['GET', SECOND, null, params],
  });
  admits(first, { tags: { gateway: 'first' } });
  admits(second, { tags: { gateway: 'second' } });
}

export const handleSummary = reporter('two-gateways', 'Do two gateways hold one tenant to one limit?');
