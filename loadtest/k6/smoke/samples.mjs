// Metrics, their samples, thresholds, and the summary of them in the form that k6 gives to handleSummary.

const BUILT_IN = {
  checks: 'rate',
  dropped_iterations: 'counter',
  http_reqs: 'counter',
  http_req_duration: 'trend',
  iterations: 'counter',
  iteration_duration: 'trend',
};

/** What can be asked of which type. */
const ASKED = {
  counter: /^(count|rate)$/,
  rate: /^rate$/,
  trend: /^(avg|min|med|max|p\(\d+(\.\d+)?\))$/,
};

const COMPARE = {
  '<': (a, b) => a < b,
  '<=': (a, b) => a <= b,
  '>': (a, b) => a > b,
  '>=': (a, b) => a >= b,
  '==': (a, b) => a === b,
  '!=': (a, b) => a !== b,
};

export class Samples {
  #types = new Map(Object.entries(BUILT_IN));
  #samples = [];
  #checks = new Map();

  /** The same metric is declared by each VU anew. */
  declare(name, type) {
    const known = this.#types.get(name);
    if (known && known !== type) throw new Error(`the metric ${name} is a ${known} already`);
    this.#types.set(name, type);
  }

  add(sample) {
    this.#samples.push(sample);
  }

  check(name, ok) {
    const counts = this.#checks.get(name) ?? { name, path: `::${name}`, passes: 0, fails: 0 };
    counts[ok ? 'passes' : 'fails'] += 1;
    this.#checks.set(name, counts);
  }

  count(metric) {
    return this.#samples.filter((sample) => sample.metric === metric).length;
  }

  get checks() {
    return [...this.#checks.values()];
  }

  /** Fails on thresholds that k6 would not accept. */
  thresholds(options) {
    return Object.entries(options.thresholds ?? {}).flatMap(([selector, expressions]) => {
      const { metric, tags } = selected(selector);
      const type = this.#types.get(metric);
      if (!type) throw new Error(`threshold on a metric that is not there: ${selector}`);
      return expressions.map((expression) => ({ selector, metric, tags, type, ...parsed(expression, type) }));
    });
  }

  /** What k6 gives to handleSummary. */
  summary(options, seconds) {
    const trends = options.summaryTrendStats ?? ['avg', 'min', 'med', 'max', 'p(90)', 'p(95)'];
    const metrics = {};
    for (const [name, type] of this.#types) {
      if (this.count(name) > 0) metrics[name] = this.#metric({ metric: name, type, tags: {} }, seconds, trends);
    }
    for (const threshold of this.thresholds(options)) {
      metrics[threshold.selector] ??= this.#metric(threshold, seconds, trends);
      metrics[threshold.selector].thresholds ??= {};
      metrics[threshold.selector].thresholds[threshold.expression] = { ok: this.holds(threshold, seconds) };
    }
    return {
      metrics,
      root_group: { name: '', path: '', id: '', groups: [], checks: this.checks },
      options,
      state: { isStdOutTTY: false, isStdErrTTY: false, testRunDurationMs: seconds * 1000 },
    };
  }

  holds(threshold, seconds) {
    const { key, compare, bound } = threshold;
    return compare(this.#values(threshold, seconds, [key])[key], bound);
  }

  #metric(selection, seconds, trends) {
    const contains = selection.metric.endsWith('_duration') ? 'time' : 'default';
    return { type: selection.type, contains, values: this.#values(selection, seconds, trends) };
  }

  #values({ metric, tags, type }, seconds, trends) {
    const wanted = Object.entries(tags);
    const values = this.#samples
      .filter((one) => one.metric === metric && wanted.every(([tag, value]) => one.tags[tag] === value))
      .map((one) => one.value);
    const sum = values.reduce((total, value) => total + value, 0);
    if (type === 'counter') return { count: sum, rate: sum / seconds };
    if (type === 'rate') {
      return { rate: values.length ? sum / values.length : 0, passes: sum, fails: values.length - sum };
    }
    return trendOf(values.sort((a, b) => a - b), sum, trends);
  }
}

function trendOf(sorted, sum, trends) {
  const quantile = (part) => {
    const at = part * (sorted.length - 1);
    const low = sorted[Math.floor(at)] ?? 0;
    return low + (at % 1) * ((sorted[Math.ceil(at)] ?? 0) - low);
  };
  const known = {
    avg: () => sum / (sorted.length || 1),
    min: () => quantile(0),
    med: () => quantile(0.5),
    max: () => quantile(1),
  };
  return Object.fromEntries(
    trends.map((name) => {
      if (!ASKED.trend.test(name)) throw new Error(`summaryTrendStats: the stand-in does not know ${name}`);
      return [name, known[name]?.() ?? quantile(Number(name.slice(2, -1)) / 100)];
    }),
  );
}

/** `metric{tag:value,tag:value}` */
function selected(selector) {
  const [, metric, list] = /^([^{}]+)(?:\{([^{}]*)\})?$/.exec(selector) ?? [];
  if (!metric) throw new Error(`no metric: ${selector}`);
  const pairs = list ? list.split(',').map((pair) => pair.split(':').map((word) => word.trim())) : [];
  return { metric, tags: Object.fromEntries(pairs) };
}

function parsed(expression, type) {
  const form = /^\s*(\w+(?:\([\d.]+\))?)\s*(<=|>=|<|>|===?|!=)\s*(-?\d+(?:\.\d+)?)\s*$/;
  const [, key, sign, bound] = form.exec(expression) ?? [];
  if (!key || !ASKED[type].test(key)) throw new Error(`no threshold of a ${type}: ${expression}`);
  return { expression, key, compare: COMPARE[sign === '===' ? '==' : sign], bound: Number(bound) };
}
