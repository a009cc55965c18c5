// How many passwords can somebody guess?
//
// In one scenario one account is attacked from ever new addresses: the rule `failures` counts what the upstream has
// answered with 401. In the other one address tries ever new accounts: the rule `tries` counts its requests. The
// upstream has to answer 401. Fails if more guesses come through than the rules allow, if fewer do, if nothing was
// refused, if a header is not as promised, or if p99 is too high.
//
// The addresses are told by X-Forwarded-For, so the gateway has to trust the machine that runs k6 (LOAD_GENERATOR in
// gateway.yaml).
//
//   BASE_URL               the gateway (http://127.0.0.1:8080)
//   ATTACKERS              guesses at once in each scenario (50)
//   DURATION               for how long (1m)
//   P99_MS                 the p99 of a request that is still good, at the client (25)
//   LOGIN_FAILURES         the limit of an account, as in gateway.yaml (5)
//   LOGIN_FAILURES_WINDOW  in which time (10m)
//   LOGIN_TRIES            the limit of an address, as in gateway.yaml (20)
//   LOGIN_TRIES_WINDOW     in which time (1m)
import exec from 'k6/execution';
import http from 'k6/http';
import type { Scenario } from 'k6/options';
import { admits } from './answers.ts';
import { secondsOf } from './ideal.ts';
import { options as withPromises, window } from './load.ts';
import { reporter } from './report.ts';
import { as, begin, type Run } from './run.ts';
import { BASE_URL, number, text } from './settings.ts';

const ATTACKERS = number('ATTACKERS', 50);
const DURATION = text('DURATION', '1m');
const FAILURES = number('LOGIN_FAILURES', 5);
const TRIES = number('LOGIN_TRIES', 20);
const URL = `${BASE_URL}/login`;

// A log is exact, but guesses that are under way at the same time may all pass.
const windows = Math.floor(window(DURATION) / secondsOf(text('LOGIN_FAILURES_WINDOW', '10m'))) + 1;
const MOST_FAILURES = windows * (FAILURES + ATTACKERS);
// A window that slides lets through what leaves it.
const MOST_TRIES = TRIES * (1 + window(DURATION) / secondsOf(text('LOGIN_TRIES_WINDOW', '1m')));

export const options = withPromises(
  { account: attack('byAccount'), address: attack('byAddress') },
  {
    'admitted{scenario:account}': [`count<=${MOST_FAILURES}`, `count>=${FAILURES}`],
    'admitted{scenario:address}': [`count<=${Math.floor(MOST_TRIES) + 1}`, `count>=${TRIES}`],
    'refused{scenario:account}': ['count>0'],
    'refused{scenario:address}': ['count>0'],
  },
);

function attack(name: string): Scenario {
  return { executor: 'constant-vus', exec: name, vus: ATTACKERS, duration: DURATION, gracefulStop: '1s' };
}

interface Attack extends Run {
  /** The first of the addresses of this run, as a number. */
  first: number;
}

export function setup(): Attack {
  const first = Math.floor(Date.now() / 10);
  return { ...begin(URL, [FAILURES, TRIES], 'POST'), first };
}

export function byAccount(attack: Attack): void {
  const from = address(10, attack.first + exec.scenario.iterationInTest);
  guess(attack, `account-${attack.name}`, from);
}

export function byAddress(attack: Attack): void {
  guess(attack, `account-${attack.name}-${exec.scenario.iterationInTest}`, address(11, attack.first));
}

/** An address of a network, by number. */
function address(network: number, n: number): string {
  return [network, (n >> 16) & 255, (n >> 8) & 255, n & 255].join('.');
}

function guess(attack: Attack, account: string, from: string): void {
  const headers = { 'X-Account': account, 'X-Forwarded-For': from };
  admits(http.post(URL, 'password=guess', as(`login-${attack.name}`, headers)), { status: 401 });
}

export const handleSummary = reporter('login', 'How many passwords can somebody guess?');
