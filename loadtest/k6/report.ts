// The report of a run: a page, the same as JSON, and a line on the terminal.
import { text } from './settings.ts';

interface Metric {
  values: Record<string, number>;
  thresholds?: Record<string, { ok: boolean }>;
}

interface Check {
  name: string;
  passes: number;
  fails: number;
}

/** What k6 gives to handleSummary, as far as it is used here. */
export interface Summary {
  metrics: Record<string, Metric>;
  root_group: { checks: Check[] };
  state: { testRunDurationMs: number };
}

interface Threshold {
  metric: string;
  promise: string;
  values: string;
  ok: boolean;
}

interface Report {
  name: string;
  question: string;
  ok: boolean;
  seconds: number;
  thresholds: Threshold[];
  checks: Check[];
  metrics: Record<string, Record<string, number>>;
}

/** For `handleSummary`: writes NAME.html and NAME.json into the folder REPORTS, which has to exist (.). */
export function reporter(name: string, question: string): (data: Summary) => Record<string, string> {
  const file = `${text('REPORTS', '.')}/${name}`;
  return (data) => {
    const report = reportOf(name, question, data);
    return {
      [`${file}.html`]: page(report),
      [`${file}.json`]: `${JSON.stringify(report, null, 2)}\n`,
      stdout: terminal(report, file),
    };
  };
}

function reportOf(name: string, question: string, data: Summary): Report {
  const thresholds = Object.entries(data.metrics).flatMap(([metric, { values, thresholds = {} }]) =>
    Object.entries(thresholds).map(([promise, { ok }]) => ({ metric, promise, values: listed(values), ok })),
  );
  return {
    name,
    question,
    ok: thresholds.every(({ ok }) => ok),
    seconds: data.state.testRunDurationMs / 1000,
    thresholds,
    checks: data.root_group.checks.map(({ name, passes, fails }) => ({ name, passes, fails })),
    metrics: Object.fromEntries(Object.entries(data.metrics).map(([metric, { values }]) => [metric, values])),
  };
}

function listed(values: Record<string, number>): string {
  return Object.entries(values).map(([key, value]) => `${key} ${rounded(value)}`).join(', ');
}

function rounded(value: number): number {
  return Math.round(value * 1000) / 1000;
}

function terminal(report: Report, file: string): string {
  const broken = report.thresholds.filter(({ ok }) => !ok);
  const lines = broken.map(({ metric, promise, values }) => `  broken: ${metric} ${promise} (${values})`);
  const failed = report.checks.filter(({ fails }) => fails > 0);
  lines.push(...failed.map(({ name, fails }) => `  not so in ${fails} cases: ${name}`));
  return [`${report.name}: ${report.ok ? 'passed' : 'FAILED'} (${file}.html)`, ...lines, ''].join('\n');
}

const STYLE = `body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; width: 100% }
td, th { border-bottom: 1px solid #ccc; padding: .3em .6em; text-align: left }
.bad { background: #fdd }`;

function page(report: Report): string {
  const thresholds = report.thresholds.map((one) => row(one.ok, one.metric, one.promise, one.values));
  const checks = report.checks.map((one) => row(one.fails === 0, one.name, one.passes, one.fails));
  const metrics = Object.entries(report.metrics).map(([metric, values]) => row(true, metric, listed(values)));
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>${escaped(report.name)}</title>
<style>${STYLE}</style>
<h1>${escaped(report.question)}</h1>
<p>${escaped(report.name)}: <strong>${report.ok ? 'passed' : 'failed'}</strong>, ${rounded(report.seconds)} s</p>
${table('Promises', ['metric', 'promise', 'measured'], thresholds)}
${table('Checks', ['check', 'so', 'not so'], checks)}
${table('All metrics', ['metric', 'values'], metrics)}
</html>
`;
}

function table(title: string, columns: string[], rows: string[]): string {
  const head = columns.map((column) => `<th>${column}</th>`).join('');
  return `<h2>${title}</h2>\n<table>\n<tr>${head}</tr>\n${rows.join('\n')}\n</table>`;
}

function row(ok: boolean, ...cells: (string | number)[]): string {
  const inner = cells.map((cell) => `<td>${escaped(String(cell))}</td>`).join('');
  return `<tr${ok ? '' : ' class="bad"'}>${inner}</tr>`;
}

function escaped(value: string): string {
  const entities: Record<string, string> = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
  return value.replace(/[&<>"]/g, (char) => entities[char] ?? char);
}
