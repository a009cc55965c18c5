// One run: its name, and whether the gateway has the limit that the script reckons with.
import { fail } from 'k6';
import http from 'k6/http';
import { header } from './answers.ts';

export interface Run {
  /** Different in each run, so that its tenants have full buckets. */
  name: string;
}

/** For `setup`: limits that the gateway does not have would make every threshold meaningless. */
export function begin(url: string, limits: number[], method: 'GET' | 'POST' = 'GET'): Run {
  const name = Date.now().toString(36);
  const params = as(`look-${name}`, { 'X-Account': `look-${name}` });
  const answer = method === 'GET' ? http.get(url, params) : http.post(url, '', params);
  // Of all rules; X-RateLimit-Limit tells only of one.
  const policy = header(answer, 'RateLimit-Policy');
  const missing = limits.filter((limit) => !policy.includes(`;q=${limit};`));
  if (missing.length > 0) {
    fail(`${url}: expected the limit ${missing}, found ${policy || 'none'} (status ${answer.status} ${answer.error})`);
  }
  return { name };
}

/** Parameters of a request of this tenant. */
export function as(tenant: string, headers: Record<string, string> = {}) {
  return { headers: { 'X-Api-Key': tenant, ...headers }, timeout: '5s' };
}
