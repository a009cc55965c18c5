// What do clients see while Redis is away?
//
// One tenant asks more often than its limit allows, many others now and then, on one gateway or on two. Break Redis
// while this runs, and mend it before it ends: this script cannot, it only looks at answers. To try: stop the process
// of Redis, pause it (kill -STOP, later kill -CONT), cut the network, fill its memory; ../chaos.sh knows twelve ways.
// Fails if an answer is neither 200 nor 429, so also if a gateway answers 5xx or nothing, if others are refused, if
// more is admitted than capacity + rate * time + slack and one capacity more (a Redis that comes back empty has
// forgotten what was taken), if a header is not as promised, or if p99 is too high.
//
//   BASE_URL         the gateway (http://127.0.0.1:8080)
//   BASE_URL_2       a second gateway on the same Redis (none)
//   RATE             requests a second of the tenant that is over its limit (500)
//   OTHERS           how many other tenants (1000)
//   OTHERS_RATE      requests a second of all of them (500)
//   DURATION         for how long (2m)
//   P99_MS           the p99 of a request that is still good, at the client (25)
//   VUS              the most requests at once in each scenario (200)
//   OUTAGE_CAPACITY  the limit of each tenant, as in gateway.yaml (200)
//   OUTAGE_REFILL    what comes back a second (100)
//   EPSILON          what gateways may hold in leases, as in gateway.yaml (0.05)
import exec from 'k6/execution';
import http from 'k6/http';
import { Counter } from 'k6/metrics';
import { admits, type Answer } from './answers.ts';
import { least, most, secondsOf, slack } from './ideal.ts';
import { arrivals, mostDropped, options as withPromises, window } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const GATEWAYS = [BASE_URL, text('BASE_URL_2', BASE_URL)];
const RATE = number('RATE', 500);
const OTHERS = number('OTHERS', 1000);
const OTHERS_RATE = number('OTHERS_RATE', 500);
const DURATION = text('DURATION', '2m');
const LIMIT = { capacity: number('OUTAGE_CAPACITY', 200), rate: number('OUTAGE_REFILL', 100) };
const SLACK = slack(LIMIT, number('EPSILON', 0.05)) + LIMIT.capacity;

// Without Redis each gateway has its share of the limit, so half of it has to be enough.
if (OTHERS_RATE / OTHERS > LIMIT.rate / 2) throw new Error('OTHERS_RATE is too much for OTHERS tenants');

const broken = new Counter('broken_answers');

export const options = withPromises(
  { limited: arrivals(RATE, DURATION, 'limited'), others: arrivals(OTHERS_RATE, DURATION, 'others') },
  {
    broken_answers: ['count==0'],
    'admitted{scenario:limited}': [
      `count<=${most(LIMIT, window(DURATION), SLACK)}`,
      // Of the local shares of a limit less may be used: half is enough to know that nobody was locked out.
      `count>=${least(LIMIT, secondsOf(DURATION), 0.5)}`,
    ],
    'refused{scenario:limited}': ['count>0'],
    'refused{scenario:others}': ['count==0'],
    dropped_iterations: [mostDropped(RATE + OTHERS_RATE, DURATION)],
  },
);

export function setup(): Run {
  return begin(`${BASE_URL}/outage`, [LIMIT.capacity]);
}

export function limited(run: Run): void {
  look(ask(`limited-${run.name}`));
}

export function others(run: Run): void {
  look(ask(`other-${run.name}-${exec.scenario.iterationInTest % OTHERS}`));
}

function ask(tenant: string): Answer {
  return http.get(`${GATEWAYS[exec.scenario.iterationInTest % 2]}/outage`, as(tenant));
}

function look(answer: Answer): void {
  admits(answer);
  broken.add(answer.status === 200 || answer.status === 429 ? 0 : 1);
}

export const handleSummary = reporter('outage', 'What do clients see while Redis is away?');
