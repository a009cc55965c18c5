#!/usr/bin/env node
// Runs one script, transpiled to JavaScript, for a handful of iterations. It is no load generator: it shows that the
// script does what it says against a real gateway.
//
//   SMOKE_ITERATIONS=20 node stand-in.mjs SCRIPT.js FOLDER_FOR_REPORTS
//
// Exit code 1 if a check fails, if a threshold fails (those on times are only reported), if the script throws, or if it
// uses something that is not known here.
import { writeFileSync } from 'node:fs';
import { basename, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { Worker } from 'node:worker_threads';
import { planOf } from './plan.mjs';
import { Samples } from './samples.mjs';
import { close, exchange } from './wire.mjs';

const [file, folder] = process.argv.slice(2);
if (!file || !folder) throw new Error('usage: stand-in.mjs SCRIPT.js FOLDER_FOR_REPORTS');
const name = basename(file, '.js');
const most = Number(process.env.SMOKE_ITERATIONS || 20);

const samples = new Samples();
const faults = [];

/** A thread with the script; it takes one order at a time. */
class Vu {
  #worker;
  #waiting;

  static async start(number) {
    const vu = new Vu();
    vu.#worker = new Worker(new URL('vu.mjs', import.meta.url), {
      workerData: { number, script: pathToFileURL(resolve(file)).href },
    });
    vu.#worker.on('message', (message) => vu.#heard(message));
    vu.#worker.on('error', (error) => vu.#waiting?.reject(error));
    return Object.assign(vu, await vu.#answer());
  }

  order(order, content = {}) {
    this.#worker.postMessage({ order, ...content });
    return order === 'end' ? undefined : this.#answer().then(({ result }) => result);
  }

  #answer() {
    return new Promise((resolve, reject) => {
      this.#waiting = { resolve, reject };
    });
  }

  #heard(message) {
    const { kind } = message;
    if (kind === 'sample') samples.add(message);
    else if (kind === 'check') samples.check(message.name, message.ok);
    else if (kind === 'metric') samples.declare(message.name, message.type);
    else if (kind === 'exchange') exchange(message);
    else if (kind === 'fault') faults.push(message.error);
    else if (kind === 'failed') this.#waiting.reject(message.error);
    else this.#waiting.resolve(message);
  }
}

async function iterate(plan, data) {
  let number = 0;
  const vus = await Promise.all(
    plan.flatMap((scenario) =>
      Array.from({ length: scenario.vus }, async (_, first) => ({ scenario, first, vu: await Vu.start(++number) })),
    ),
  );
  const started = performance.now();
  await Promise.all(vus.map(({ vu, ...what }) => vu.order('iterate', { ...what, data })));
  const seconds = (performance.now() - started) / 1000;
  vus.forEach(({ vu }) => vu.order('end'));
  return seconds;
}

/** Writes what handleSummary has returned: files into the folder for reports, whatever folder they name. */
function write(output) {
  if (!output) throw new Error('the script exports no handleSummary');
  for (const [target, content] of Object.entries(output)) {
    if (target === 'stdout') process.stdout.write(content);
    else if (target === 'stderr') process.stderr.write(content);
    else writeFileSync(resolve(folder, basename(target)), content);
  }
}

function judge(options, seconds) {
  const late = [];
  for (const threshold of samples.thresholds(options)) {
    if (samples.holds(threshold, seconds)) continue;
    const told = `${threshold.selector} ${threshold.expression}`;
    // The time of a few requests, on a machine that does other things as well, says nothing.
    if (threshold.type === 'trend') late.push(told);
    else faults.push(`threshold: ${told}`);
  }
  for (const { name: check, fails } of samples.checks) if (fails > 0) faults.push(`check: ${check}, ${fails} times`);
  if (samples.count('checks') === 0) faults.push('nothing was checked');
  return late;
}

function conclude(seconds, late) {
  const counts = `${samples.count('http_reqs')} requests, ${samples.count('checks')} checks, ${seconds.toFixed(1)} s`;
  const note = late.length ? `, slower than ${late.join(' and ')}` : '';
  for (const fault of new Set(faults)) console.error(`  ${fault}`);
  console.log(`${faults.length ? 'FAILED' : 'ok'} ${name}: ${counts}${note}`);
  process.exitCode = faults.length ? 1 : 0;
}

async function main() {
  const first = await Vu.start(0);
  const plan = planOf(first.options, first.exported, most);
  samples.thresholds(first.options); // faults in them before anything is sent
  const data = await first.order('setup');
  const seconds = await iterate(plan, data);
  await first.order('teardown', { data });
  write(await first.order('summary', { summary: samples.summary(first.options, seconds) }));
  first.order('end');
  conclude(seconds, judge(first.options, seconds));
  close();
}

main().catch((error) => {
  console.error(`  ${error.stack ?? error}`);
  console.log(`FAILED ${name}`);
  process.exit(1);
});
