// A VU: a thread with the script loaded anew, as in k6. It does what the main thread orders.
import { parentPort, workerData } from 'node:worker_threads';
import { pause, sample, tell, vu } from './vu-state.mjs';

globalThis.__ENV = { ...process.env };
globalThis.__VU = workerData.number;
globalThis.__ITER = 0;

/** As k6 hands data over: as JSON. */
const handed = (data) => (data === undefined ? undefined : JSON.parse(JSON.stringify(data)));

const ORDERS = {
  setup(script) {
    vu.phase = 'setup';
    return handed(script.setup?.());
  },

  /** Each VU takes every so-manieth iteration of a scenario. */
  iterate(script, { scenario, first, data }) {
    vu.phase = 'iteration';
    vu.scenario = scenario;
    const started = Date.now();
    vu.scenario.started = started;
    for (let turn = first; turn < scenario.iterations; turn += scenario.vus) {
      pause(started + turn * scenario.gap - Date.now());
      if (Date.now() - started > scenario.ms) break;
      iteration(script, turn, data);
    }
  },

  teardown(script, { data }) {
    vu.phase = 'teardown';
    script.teardown?.(handed(data));
  },

  summary(script, { summary }) {
    vu.phase = 'summary';
    return script.handleSummary?.(summary);
  },
};

function iteration(script, turn, data) {
  vu.iterationInTest = turn;
  const begun = Date.now();
  try {
    script[vu.scenario.exec](handed(data));
  } catch (error) {
    // k6 goes on with the next iteration, and so does this; the run fails in the end.
    tell('fault', { error: place(error) });
  }
  sample('iterations', 1);
  sample('iteration_duration', Date.now() - begun);
  globalThis.__ITER += 1;
}

/** An error, and where in the script it was. */
function place(error) {
  const [message, ...frames] = String(error.stack ?? error).split('\n');
  return [message, ...frames.filter((frame) => frame.includes('/scripts/'))].join('\n  ');
}

const script = await import(workerData.script);
const exported = Object.keys(script).filter((name) => typeof script[name] === 'function');
tell('ready', { options: script.options ?? {}, exported });

parentPort.on('message', ({ order, ...content }) => {
  if (order === 'end') {
    parentPort.close();
    return;
  }
  try {
    tell('done', { result: ORDERS[order](script, content) });
  } catch (error) {
    tell('failed', { error: place(error) });
  }
});
