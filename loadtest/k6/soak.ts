// Is everything still true after hours?
//
// At a low rate, three at once: tenants under their limits, one tenant at twice its limit, and one account whose
// password is guessed. Fails if tenants under their limits are refused, if the tenant over its limit gets more than
// capacity + rate * time + slack or less than SHARE of it, if a header is not as promised, or if p99 is too high in
// the first or in the last tenth of the time. Look at the memory of gateways and Redis as well: clients do not see it.
//
//   BASE_URL         the gateway (http://127.0.0.1:8080)
//   TENANTS          how many tenants under their limits (1000)
//   RATE             requests a second of all of them (200)
//   LOGIN_RATE       guesses a second (1)
//   DURATION         for how long (4h)
//   SHARE            the share of the ideal that has to be admitted (0.95)
//   P99_MS           the p99 of a request that is still good, at the client (25)
//   VUS              the most requests at once in each scenario (200)
//   STEADY_CAPACITY  the limit of tenants under their limits, as in gateway.yaml (20)
//   STEADY_REFILL    what comes back a second to them (10)
//   FLOOD_CAPACITY   the limit of the tenant over its limit, as in gateway.yaml (1000)
//   FLOOD_REFILL     what comes back a second (500)
//   EPSILON          what gateways may hold in leases, as in gateway.yaml (0.05)
//   LOGIN_FAILURES         the limit of an account, as in gateway.yaml (5)
//   LOGIN_FAILURES_WINDOW  in which time (10m)
import exec from 'k6/execution';
import http from 'k6/http';
import { admits } from './answers.ts';
import { least, most, secondsOf, slack } from './ideal.ts';
import { arrivals, FAST, mostDropped, options as withPromises, window } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const TENANTS = number('TENANTS', 1000);
const RATE = number('RATE', 200);
const LOGIN_RATE = number('LOGIN_RATE', 1);
const DURATION = text('DURATION', '4h');
const SHARE = number('SHARE', 0.95);
const LIMIT = { capacity: number('FLOOD_CAPACITY', 1000), rate: number('FLOOD_REFILL', 500) };
const SLACK = slack(LIMIT, number('EPSILON', 0.05));
const FAILURES = number('LOGIN_FAILURES', 5);

if (RATE / TENANTS > number('STEADY_REFILL', 10)) throw new Error('RATE is over the limit of TENANTS tenants');

// With LOGIN_RATE a second, no more than that are under way at the same time.
const windows = Math.floor(window(DURATION) / secondsOf(text('LOGIN_FAILURES_WINDOW', '10m'))) + 1;
const MOST_FAILURES = windows * (FAILURES + LOGIN_RATE);

export const options = withPromises(
  {
    tenants: arrivals(RATE, DURATION, 'tenants'),
    limited: arrivals(2 * LIMIT.rate, DURATION, 'limited'),
    guesses: arrivals(LOGIN_RATE, DURATION, 'guesses'),
  },
  {
    'refused{scenario:tenants}': ['count==0'],
    'admitted{scenario:limited}': [
      `count<=${most(LIMIT, window(DURATION), SLACK)}`,
      `count>=${least(LIMIT, secondsOf(DURATION), SHARE)}`,
    ],
    'admitted{scenario:guesses}': [`count<=${MOST_FAILURES}`],
    'http_req_duration{part:first}': [FAST],
    'http_req_duration{part:last}': [FAST],
    dropped_iterations: [mostDropped(RATE + 2 * LIMIT.rate + LOGIN_RATE, DURATION)],
  },
);

export function setup(): Run {
  begin(`${BASE_URL}/steady`, [number('STEADY_CAPACITY', 20)]);
  begin(`${BASE_URL}/login`, [FAILURES], 'POST');
  return begin(`${BASE_URL}/flood`, [LIMIT.capacity]);
}

/** The tag that tells the first and the last tenth of the time apart from the rest. */
function part(): { part: string } {
  const { progress } = exec.scenario;
  return { part: progress < 0.1 ? 'first' : progress < 0.9 ? 'middle' : 'last' };
}

export function tenants(run: Run): void {
  const params = as(`soak-${run.name}-${exec.scenario.iterationInTest % TENANTS}`);
  admits(http.get(`${BASE_URL}/steady`, { ...params, tags: part() }));
}

export function limited(run: Run): void {
  admits(http.get(`${BASE_URL}/flood`, { ...as(`soak-${run.name}`), tags: part() }));
}

export function guesses(run: Run): void {
  const params = as(`soak-${run.name}`, { 'X-Account': `soak-${run.name}`, 'X-Forwarded-For': guesser() });
  admits(http.post(`${BASE_URL}/login`, 'password=guess', { ...params, tags: part() }), { status: 401 });
}

/** A new address for each guess, so that only the rule of the account refuses. */
function guesser(): string {
  const n = Math.floor(Date.now() / 10);
  return `12.${(n >> 16) & 255}.${(n >> 8) & 255}.${n & 255}`;
}

export const handleSummary = reporter('soak', 'Is everything still true after hours?');
