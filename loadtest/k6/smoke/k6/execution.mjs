// k6/execution: the scenario of an iteration.
import { strict } from '../strict.mjs';
import { vu } from '../vu-state.mjs';

const scenario = strict('exec.scenario', {
  get name() {
    return running().name;
  },
  get iterationInTest() {
    return running() && vu.iterationInTest;
  },
  get progress() {
    const { started, ms } = running();
    return Math.min(1, (Date.now() - started) / ms);
  },
});

function running() {
  if (!vu.scenario) throw new Error('there is a scenario only in iterations');
  return vu.scenario;
}

export default strict('exec', { scenario });
