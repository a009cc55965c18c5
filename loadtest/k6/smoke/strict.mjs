// Objects that throw when something is read that they do not have: a script must not use what the stand-in lacks, and
// find `undefined`.

/** Names that the language itself looks for. */
const ASKED_BY_THE_LANGUAGE = new Set(['then', 'toJSON']);

export function strict(name, object) {
  return new Proxy(object, {
    get(target, key) {
      if (key in target || typeof key === 'symbol' || ASKED_BY_THE_LANGUAGE.has(key)) return target[key];
      throw new Error(`the stand-in has no ${name}.${key}`);
    },
  });
}

/** Fails on keys that are not known: an option that does nothing here would be believed to be tested. */
export function onlyKnown(name, object, known) {
  for (const key of Object.keys(object)) {
    if (!known.includes(key)) throw new Error(`${name}: the stand-in does not know ${key}`);
  }
}
