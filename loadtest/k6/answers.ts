// What every answer of a gateway has to say.
import { check } from 'k6';
import type { RefinedResponse, ResponseType } from 'k6/http';
import { Counter } from 'k6/metrics';

export type Answer = RefinedResponse<ResponseType | undefined>;

/** Tokens that were admitted. */
const admitted = new Counter('admitted');
/** Requests that were refused. */
const refused = new Counter('refused');

interface Expected {
  /** Units that the request takes. */
  cost?: number;
  /** What the upstream answers. */
  status?: number;
  /** Tags of what is counted. */
  tags?: Record<string, string>;
}

/** Checks an answer that is either the upstream's or a refusal, counts it, and says whether it was admitted. */
export function admits(answer: Answer, { cost = 1, status = 200, tags = {} }: Expected = {}): boolean {
  check(answer, {
    'the status is the one of the upstream, or 429': () => [status, 429].includes(answer.status),
    'X-RateLimit-Limit, -Remaining and -Reset are whole numbers': () =>
      ['Limit', 'Remaining', 'Reset'].every((name) => told(answer, name) >= 0),
    'no more remains than the limit': () => told(answer, 'Remaining') <= told(answer, 'Limit'),
  });
  if (answer.status === 429) {
    refuses(answer, cost);
    refused.add(1, tags);
  } else {
    check(answer, { 'what is admitted need not be tried again': () => !header(answer, 'Retry-After') });
  }
  if (answer.status !== status) return false;
  admitted.add(cost, tags);
  return true;
}

function refuses(answer: Answer, cost: number): void {
  const wait = retryAfter(answer);
  check(answer, {
    'Retry-After is at least 1': () => wait >= 1,
    'X-RateLimit-Reset is not after Retry-After': () => told(answer, 'Reset') <= wait,
    'less remains than the request takes': () => told(answer, 'Remaining') < cost,
    'a refusal is not stored': () => header(answer, 'Cache-Control') === 'no-store',
    'the body is a problem that says the same': () => isProblem(answer, wait),
  });
}

/** Whether the body is application/problem+json, and says what the status and Retry-After say. */
export function isProblem(answer: Answer, wait?: number): boolean {
  if (header(answer, 'Content-Type') !== 'application/problem+json' || !answer.body) return false;
  const problem = answer.json() as { status?: number; retry_after?: number };
  return problem.status === answer.status && problem.retry_after === wait;
}

/** The value of X-RateLimit-`name`; NaN if it is missing or no whole number. */
export function told(answer: Answer, name: string): number {
  return whole(header(answer, `X-RateLimit-${name}`));
}

export function retryAfter(answer: Answer): number {
  return whole(header(answer, 'Retry-After'));
}

function whole(value: string): number {
  return /^\d+$/.test(value) ? Number(value) : NaN;
}

/** k6 changes the case of names (X-Ratelimit-Limit), so they are compared without it. */
export function header(answer: Answer, name: string): string {
  const found = Object.entries(answer.headers).find(([key]) => key.toLowerCase() === name.toLowerCase());
  return found?.[1] ?? '';
}
