// Scenarios and thresholds that scripts have in common.
import type { Options, Scenario } from 'k6/options';
import { secondsOf } from './ideal.ts';
import { number } from './settings.ts';

/** How long requests may be under way after the end: part of the time over which an ideal is computed. */
const GRACE = 1;

const VUS = number('VUS', 200);

/** The seconds in which something can be admitted. */
export function window(duration: string): number {
  return secondsOf(duration) + GRACE;
}

/** So many requests a second, however long answers take: a slow gateway must not be asked less. */
export function arrivals(rate: number, duration: string, exec = 'default'): Scenario {
  return {
    executor: 'constant-arrival-rate',
    exec,
    rate,
    timeUnit: '1s',
    duration,
    preAllocatedVUs: Math.min(VUS, rate),
    maxVUs: VUS,
    gracefulStop: `${GRACE}s`,
  };
}

/** At most one request in a hundred may be left out because k6 had no VU for it: else the load was another one. */
export function mostDropped(rate: number, duration: string): string {
  return `count<=${Math.floor((rate * secondsOf(duration)) / 100)}`;
}

/** Time as the client sees it: gateway, upstream and network together. */
export const FAST = `p(99)<${number('P99_MS', 25)}`;

export function options(scenarios: Record<string, Scenario>, thresholds: Record<string, string[]>): Options {
  return {
    scenarios,
    thresholds: { checks: ['rate==1'], http_req_duration: [FAST], ...thresholds },
    summaryTrendStats: ['min', 'med', 'p(95)', 'p(99)', 'max'],
  };
}
