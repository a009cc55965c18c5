// k6/metrics: Counter and Rate.
import { sample, tell, vu } from '../vu-state.mjs';

class Metric {
  constructor(name, type) {
    if (vu.phase !== 'init') throw new Error('metrics are made in the init context');
    if (!/^[a-zA-Z_][a-zA-Z0-9_]{0,127}$/.test(name)) throw new Error(`no name of a metric: ${name}`);
    this.name = name;
    tell('metric', { name, type });
  }

  record(value, tags) {
    if (vu.phase === 'init') throw new Error('nothing can be added to metrics in the init context');
    if (!Number.isFinite(value)) throw new Error(`${this.name}: ${value} is no number`);
    sample(this.name, value, tags);
  }
}

export class Counter extends Metric {
  constructor(name) {
    super(name, 'counter');
  }

  add(value, tags) {
    this.record(value, tags);
  }
}

export class Rate extends Metric {
  constructor(name) {
    super(name, 'rate');
  }

  add(value, tags) {
    this.record(value ? 1 : 0, tags);
  }
}
