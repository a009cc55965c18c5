// From `options` to a handful of iterations. What is not known here is a fault.
import { milliseconds } from './durations.mjs';
import { onlyKnown } from './strict.mjs';

const EXECUTORS = {
  'constant-arrival-rate': {
    keys: ['rate', 'timeUnit', 'duration', 'preAllocatedVUs', 'maxVUs'],
    // Spread over the whole duration, so that what comes back meanwhile is what the script reckons with.
    reduce({ rate, timeUnit = '1s', duration, preAllocatedVUs }, most) {
      whole({ rate, preAllocatedVUs });
      const ms = milliseconds(duration);
      const iterations = Math.min(Math.floor((rate * ms) / milliseconds(timeUnit)), VUS * most);
      return { vus: VUS, iterations, ms, gap: ms / iterations };
    },
  },
  'constant-vus': {
    keys: ['vus', 'duration'],
    reduce({ vus, duration }, most) {
      whole({ vus });
      const used = Math.min(vus, VUS);
      return { vus: used, iterations: used * most, ms: milliseconds(duration), gap: 0 };
    },
  },
  'per-vu-iterations': {
    keys: ['vus', 'iterations', 'maxDuration'],
    reduce({ vus, iterations, maxDuration = '10m' }, most) {
      whole({ vus, iterations });
      const used = Math.min(vus, VUS);
      return { vus: used, iterations: used * Math.min(iterations, most), ms: milliseconds(maxDuration), gap: 0 };
    },
  },
};

const VUS = 2;

function whole(values) {
  for (const [name, value] of Object.entries(values)) {
    if (!Number.isInteger(value) || value < 1) throw new Error(`${name} has to be a whole number: ${value}`);
  }
}

export function planOf(options, exported, most) {
  onlyKnown('options', options, ['scenarios', 'thresholds', 'summaryTrendStats']);
  const scenarios = Object.entries(options.scenarios ?? {});
  if (scenarios.length === 0) throw new Error('there are no scenarios');
  return scenarios.map(([name, scenario]) => scenarioOf(name, scenario, exported, most));
}

function scenarioOf(name, scenario, exported, most) {
  const executor = EXECUTORS[scenario.executor];
  if (!executor) throw new Error(`${name}: the stand-in does not know the executor ${scenario.executor}`);
  onlyKnown(name, scenario, ['executor', 'exec', 'gracefulStop', ...executor.keys]);
  milliseconds(scenario.gracefulStop ?? '30s');
  const exec = scenario.exec ?? 'default';
  if (!exported.includes(exec)) throw new Error(`${name}: the script exports no function ${exec}`);
  return { name, exec, ...executor.reduce(scenario, most) };
}
