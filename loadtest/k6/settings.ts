// Settings come from the environment: k6 run -e NAME=value script.ts

export function text(name: string, otherwise: string): string {
  return __ENV[name] || otherwise;
}

export function number(name: string, otherwise: number): number {
  const value = Number(text(name, String(otherwise)));
  // A typing error must not become a threshold that nothing can fail.
  if (!Number.isFinite(value)) throw new Error(`${name} is no number: ${__ENV[name]}`);
  return value;
}

/** The first gateway, without a slash at the end. */
export const BASE_URL = text('BASE_URL', 'http://127.0.0.1:8080').replace(/\/+$/, '');
