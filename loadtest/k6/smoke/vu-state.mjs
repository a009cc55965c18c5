// What a VU is doing, and its ways to the main thread. The modules of k6/ read this.
import { parentPort, receiveMessageOnPort, MessageChannel } from 'node:worker_threads';

export const vu = {
  /** init, setup, iteration, teardown, summary */
  phase: 'init',
  number: 0,
  scenario: null,
  iterationInTest: 0,
};

/** Tells the main thread of a metric, a sample, a check or an error. */
export function tell(kind, content) {
  parentPort.postMessage({ kind, ...content });
}

export function sample(metric, value, tags = {}) {
  const scenario = vu.scenario ? { scenario: vu.scenario.name } : {};
  tell('sample', { metric, value, tags: { ...scenario, ...tags } });
}

/** Sends requests at the same time, and waits for all answers: the main thread does it, this one sleeps meanwhile. */
export function exchange(requests) {
  const done = new Int32Array(new SharedArrayBuffer(4));
  const { port1, port2 } = new MessageChannel();
  parentPort.postMessage({ kind: 'exchange', requests, done, port: port2 }, [port2]);
  Atomics.wait(done, 0, 0);
  const { message } = receiveMessageOnPort(port1);
  port1.close();
  return message;
}

export function pause(ms) {
  if (ms > 0) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
}
