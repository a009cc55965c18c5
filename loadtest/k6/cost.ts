// Are tokens counted right when requests cost differently?
//
// One tenant asks routes of cost 1, 5 and 20, and one whose cost it tells in X-Units; all of them take from one bucket.
// Now and then it asks for more than the bucket can ever hold. Fails if more tokens are admitted than
// capacity + rate * time, or less than SHARE of it, if a refusal that time cannot mend names a time, if a header is not
// as promised, or if p99 is too high.
//
//   BASE_URL       the gateway (http://127.0.0.1:8080)
//   RATE           requests a second (500)
//   DURATION       for how long (1m)
//   SHARE          the share of the ideal that has to be admitted (0.95)
//   P99_MS         the p99 of a request that is still good, at the client (25)
//   VUS            the most requests at once (200)
//   COST_CAPACITY  the limit, as in gateway.yaml (200)
//   COST_REFILL    what comes back a second (100)
import { check } from 'k6';
import exec from 'k6/execution';
import http from 'k6/http';
import { admits, header, isProblem } from './answers.ts';
import { least, most, secondsOf } from './ideal.ts';
import { arrivals, mostDropped, options as withPromises, window } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const RATE = number('RATE', 500);
const DURATION = text('DURATION', '1m');
const SHARE = number('SHARE', 0.95);
const LIMIT = { capacity: number('COST_CAPACITY', 200), rate: number('COST_REFILL', 100) };

const DEAREST = 20;
const TOLD = 3;
const KINDS: [string, number][] = [['1', 1], ['5', 5], ['20', DEAREST], ['told', TOLD]];

export const options = withPromises(
  { cost: arrivals(RATE, DURATION) },
  {
    admitted: [
      `count<=${most(LIMIT, window(DURATION))}`,
      `count>=${least(LIMIT, secondsOf(DURATION), SHARE, DEAREST)}`,
    ],
    refused: ['count>0'],
    dropped_iterations: [mostDropped(RATE, DURATION)],
  },
);

export function setup(): Run {
  return begin(`${BASE_URL}/cost/1`, [LIMIT.capacity]);
}

export default function (run: Run): void {
  const turn = exec.scenario.iterationInTest;
  const [path, cost] = KINDS[turn % KINDS.length] ?? ['1', 1];
  admits(http.get(`${BASE_URL}/cost/${path}`, as(`cost-${run.name}`, { 'X-Units': String(TOLD) })), { cost });
  if (turn % 10 === 0) neverFits(run);
}

function neverFits(run: Run): void {
  const units = { 'X-Units': String(LIMIT.capacity + 1) };
  const answer = http.get(`${BASE_URL}/cost/told`, as(`cost-${run.name}`, units));
  check(answer, {
    'a cost above the limit is refused': () => answer.status === 429 && isProblem(answer),
    'no time is named that would not help': () => !header(answer, 'Retry-After'),
  });
}

export const handleSummary = reporter('cost', 'Are tokens counted right when requests cost differently?');
