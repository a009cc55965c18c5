// Milliseconds of a duration as k6 writes it.
const UNITS = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 };

export function milliseconds(duration) {
  if (!/^(\d+(\.\d+)?(ms|s|m|h))+$/.test(duration)) throw new Error(`no duration: ${duration}`);
  const parts = duration.matchAll(/(\d+(?:\.\d+)?)(ms|s|m|h)/g);
  return [...parts].reduce((sum, [, value, unit]) => sum + Number(value) * UNITS[unit], 0);
}
