// What a token bucket promises, as numbers.

export interface Limit {
  capacity: number;
  /** Tokens a second. */
  rate: number;
}

const UNITS: Record<string, number> = { ms: 0.001, s: 1, m: 60, h: 3600 };

/** Seconds of a duration as k6 writes it: 90s, 1m30s, 4h. */
export function secondsOf(duration: string): number {
  if (!/^(\d+(\.\d+)?(ms|s|m|h))+$/.test(duration)) throw new Error(`no duration: ${duration}`);
  const parts = duration.matchAll(/(\d+(?:\.\d+)?)(ms|s|m|h)/g);
  return [...parts].reduce((sum, part) => sum + Number(part[1]) * (UNITS[part[2] ?? 's'] ?? 1), 0);
}

/** The most that may be admitted in any window of so many seconds. */
export function most({ capacity, rate }: Limit, seconds: number, slack = 0): number {
  return Math.floor(capacity + rate * seconds + slack);
}

/**
 * The least that must be admitted of a bucket that is full at first and always asked for more. `unspent` is what may be
 * left in it at the end.
 */
export function least({ capacity, rate }: Limit, seconds: number, share: number, unspent = 1): number {
  return Math.max(1, Math.floor((capacity + rate * seconds) * share - unspent));
}

/** What all gateways together may hold of a key in leases (docs/leases.md). */
export function slack({ capacity, rate }: Limit, epsilon: number): number {
  return Math.floor(epsilon * Math.max(capacity, rate));
}
