//! Reading the rows of a configuration, of which there can be half a million.

use std::collections::HashSet;
use std::hash::Hash;
use std::io;
use std::sync::Arc;
use std::thread;

use foldhash::fast::RandomState;

use super::env::Lookup;
use super::fault::{Fault, Place};
use super::fields::Reading;
use super::split::{self, Part};
use super::yaml::{self, Node};
use super::{Config, Row, Terms, decode, understand};

/// Where they stand in a configuration.
const PATH: [&str; 2] = ["rules", "rows"];

/// A shorter text is not worth a thread.
const LONG: usize = 1 << 20;

/// How many threads read a long one.
const THREADS: usize = 2;

/// Reads a configuration from its beginning to its end.
pub(super) fn at_once(text: &str, lookup: Lookup<'_>) -> (Option<Config>, Vec<Fault>) {
    let mut faults = Vec::new();
    let mut rows = Rows::of(text);
    let Some(root) = rows.read(text, 0, &PATH, lookup, &mut faults).0 else {
        if faults.is_empty() {
            faults.push(Fault::new(Place { line: 1, column: 1 }, "", "the file is empty"));
        }
        return (None, faults);
    };
    understand(&root, rows.read, Reading { faults, lookup })
}

/// Reads a configuration with many rows, all parts of them at the same time. `None` if there are not many, or anything is
/// wrong with them.
pub(super) fn in_parts(text: &str, lookup: Lookup<'_>) -> Option<(Option<Config>, Vec<Fault>)> {
    if text.len() < LONG { None } else { cut(text, THREADS, lookup) }
}

fn cut(text: &str, threads: usize, lookup: Lookup<'_>) -> Option<(Option<Config>, Vec<Fault>)> {
    let split = split::rows(text, threads)?;
    let mut rows = Rows::of(text);
    let mut faults = Vec::new();
    let (root, found) = rows.read(&split.rest, 0, &PATH, lookup, &mut faults);
    let alone = faults.is_empty() && found.is_some_and(|place| place.line == split.line);
    let root = root.filter(|_| alone)?;
    let parts = thread::scope(|scope| {
        let spawn = |part| thread::Builder::new().spawn_scoped(scope, move || Rows::of_part(part, lookup));
        let readers: io::Result<Vec<_>> = split.parts.iter().map(spawn).collect();
        readers.ok()?.into_iter().map(|reader| reader.join().ok().flatten()).collect::<Option<Vec<_>>>()
    })?;
    rows.read.extend(parts.into_iter().flatten());
    Some(understand(&root, rows.read, Reading { faults, lookup }))
}

/// Rows as they are read, made of the copies that all share: half a million rows have few different terms, and few
/// routes, and those of a tenant stand together as a rule.
struct Rows {
    read: Vec<Row>,
    index: usize,
    terms: HashSet<Arc<Terms>, RandomState>,
    routes: HashSet<Arc<str>, RandomState>,
    tenant: Option<Arc<str>>,
}

impl Rows {
    /// None yet of those of `text`.
    fn of(text: &str) -> Self {
        // Half a million rows are not to be moved again and again while their list grows. Memory that is not
        // written to costs nothing, and no row is shorter than this.
        let most = text.len() / "{tenant: a, capacity: 1, refill_per_second: 1}".len();
        Self {
            read: Vec::with_capacity(most),
            index: 0,
            terms: HashSet::default(),
            routes: HashSet::default(),
            tenant: None,
        }
    }

    /// Those of a part, if nothing is wrong with them.
    fn of_part(part: &Part<'_>, lookup: Lookup<'_>) -> Option<Vec<Row>> {
        let (mut rows, mut faults) = (Self::of(part.text), Vec::new());
        let (root, found) = rows.read(part.text, part.lines_before, &[], lookup, &mut faults);
        (root.is_some() && found.is_some() && faults.is_empty()).then_some(rows.read)
    }

    /// Takes the rows of `text` that stand under `path`, and returns the rest of it, and where they stood.
    fn read<'a>(
        &mut self,
        text: &'a str,
        lines_before: u32,
        path: &[&str],
        lookup: Lookup<'_>,
        faults: &mut Vec<Fault>,
    ) -> (Option<Node<'a>>, Option<Place>) {
        let mut take = |item, faults: &mut Vec<Fault>| {
            let mut reading = Reading { faults: std::mem::take(faults), lookup };
            if let Some(row) = decode::row(&item, self.index, &mut reading) {
                let row = self.shared(row);
                self.read.push(row);
            }
            self.index += 1;
            *faults = reading.faults;
        };
        let mut streamed = yaml::Rows { path, take: &mut take, found: None };
        let root = yaml::parse(text, lines_before, &mut streamed, faults);
        (root, streamed.found)
    }

    /// A row made of the copies that all rows share.
    fn shared(&mut self, mut row: Row) -> Row {
        row.terms.value = one_of(&mut self.terms, row.terms.value);
        if let Some(route) = &mut row.route {
            route.value = one_of(&mut self.routes, Arc::clone(&route.value));
        }
        if row.tenant == self.tenant {
            row.tenant.clone_from(&self.tenant);
        } else {
            self.tenant.clone_from(&row.tenant);
        }
        row
    }
}

fn one_of<T: ?Sized + Hash + Eq>(known: &mut HashSet<Arc<T>, RandomState>, value: Arc<T>) -> Arc<T> {
    if let Some(known) = known.get(&*value) {
        return Arc::clone(known);
    }
    known.insert(Arc::clone(&value));
    value
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    /// What may stand in a line: rows as people write them, and whatever else could mislead who cuts a text unread.
    const LINES: [&str; 24] = [
        "- {tenant: t1, capacity: 7, refill_per_second: 7}",
        "- {tenant: t2, route: r, capacity: 8, refill_per_second: 5/m}",
        "- {tenant: t3, capacity: 9,",
        "  refill_per_second: 9}",
        "- tenant: t4",
        "  route: r",
        "  capacity: 10",
        "  refill_per_second: 10",
        "-",
        "- \"t5",
        "  t5\"",
        "- &x {tenant: t6, capacity: 1, refill_per_second: 1}",
        "- *x",
        "- |",
        "- !t {tenant: t7, capacity: 1, refill_per_second: 1}",
        "# a remark",
        "",
        "  ",
        "default: {capacity: 1, refill_per_second: 1}",
        "headers: []",
        "rows:",
        "---",
        "- {tenant: \u{e4}, capacity: 0, refill_per_second: 1}",
        "\t- a",
    ];

    fn text(lines: &[(&str, usize)]) -> String {
        let mut text = String::from(
            "upstreams: {u: {servers: [127.0.0.1:1]}}\nroutes: [{id: r, match: {path: /}, upstream: u}]\n\
             rules:\n  rows:\n",
        );
        for (line, indented) in lines {
            text.push_str(&" ".repeat(*indented));
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    fn same(text: &str) -> bool {
        let in_parts = cut(text, 3, &|_| None);
        let was_cut = in_parts.is_some();
        if let Some(in_parts) = in_parts {
            assert_eq!(in_parts, at_once(text, &|_| None), "{text}");
        }
        was_cut
    }

    #[test]
    fn rows_are_read_in_parts() {
        for indented in [2, 4] {
            let row = |index: usize| (LINES[[0, 1, 15, 16][index % 4]], indented);
            let rows: Vec<_> = (0..100).map(row).chain([(LINES[18], 2)]).collect();
            let text = text(&rows);
            let split = split::rows(&text, 3).unwrap();
            assert_eq!(split.parts.len(), 3);
            assert_eq!(split.parts[0].lines_before, 4);
            assert!(same(&text));
            let (config, faults) = cut(&text, 3, &|_| None).unwrap();
            let config = config.unwrap();
            assert_eq!((config.rules.rows.len(), faults.len()), (50, 0));
            assert_eq!(config.rules.default.value.capacity(), 1);
            let last = config.rules.rows[49].terms.place.line;
            assert!(text.lines().nth(last as usize - 1).unwrap().contains("t2"));
        }
    }

    /// A fault is told by reading at once, and so is what is no list of rows.
    #[test]
    fn what_is_not_plain_is_not_cut() {
        let rows = |extra: &'static str| text(&[(LINES[0], 4), (LINES[1], 4), (extra, 4), (LINES[0], 4)]);
        assert!(same(&rows(LINES[0])));
        for extra in ["- {tenant: t}", "- *x", "- \"t", "- [", "rows:", "- !t a"] {
            assert!(!same(&rows(extra)), "{extra}");
        }
        let elsewhere = rows(LINES[0]).replace("  rows:", "  named:\n    rows:");
        assert!(!same(&elsewhere));
        assert!(!same(&rows(LINES[0]).replace("    -", "-")), "left of its key");
        assert!(!same("rules: {}\n# rows:\n"));
    }

    proptest! {
        #[test]
        fn in_parts_means_the_same_as_at_once(
            lines in vec((select(&LINES[..]), select(&[4_usize, 4, 4, 4, 4, 2, 0, 6][..])), 0..12),
        ) {
            same(&text(&lines));
        }

        #[test]
        fn also_where_most_is_plain(
            lines in vec((select(&LINES[..2]), Just(4_usize)), 4..30),
            odd in select(&LINES[..]),
            indented in select(&[4_usize, 2, 0, 6][..]),
            at in any::<prop::sample::Index>(),
        ) {
            let mut lines = lines;
            lines.insert(at.index(lines.len()), (odd, indented));
            same(&text(&lines));
        }
    }
}
