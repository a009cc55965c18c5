// k6: check, fail, sleep.
import { pause, sample, tell, vu } from '../vu-state.mjs';

export function check(value, checks, tags = {}) {
  let all = true;
  for (const [name, holds] of Object.entries(checks)) {
    const ok = Boolean(typeof holds === 'function' ? holds(value) : holds);
    tell('check', { name, ok });
    sample('checks', ok ? 1 : 0, { ...tags, check: name });
    all = all && ok;
  }
  return all;
}

export function fail(reason = '') {
  throw new Error(reason);
}

export function sleep(seconds) {
  if (typeof seconds !== 'number' || Number.isNaN(seconds)) throw new Error(`sleep: ${seconds} is no number`);
  if (vu.phase === 'init') throw new Error('sleep is not there in the init context');
  pause(seconds * 1000);
}
