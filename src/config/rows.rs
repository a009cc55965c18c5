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
use super::split::{self, Part, Split};
use super::yaml::{self, Node, Streamed};
use super::{Config, Row, Terms, decode, understand};

/// Where they stand in a configuration.
const PATH: [&str; 2] = ["rules", "rows"];

/// A shorter text is not worth a thread.
const LONG: usize = 1 << 20;

/// How many threads read a long one.
const THREADS: usize = 2;

/// Reads a configuration from its beginning to its end.
pub(super) fn at_once(text: &str, lookup: Lookup<'_>) -> (Option<Config>, Vec<Fault>) {
    let (mut reader, mut faults) = (Reader::new(text.len(), lookup), Vec::new());
    let mut take = |item, faults: &mut Vec<Fault>| reader.take(&item, faults);
    let root = yaml::parse(text, 0, &mut Streamed::new(&PATH, &mut take), &mut faults);
    let Some(root) = root else {
        if faults.is_empty() {
            faults.push(Fault::new(Place { line: 1, column: 1 }, "", "the file is empty"));
        }
        return (None, faults);
    };
    understand(&root, reader.rows, Reading { faults, lookup })
}

/// Reads a configuration with many rows, all parts of them at the same time. `None` if there are not many, or
/// anything is wrong with them.
pub(super) fn in_parts(text: &str, lookup: Lookup<'_>) -> Option<(Option<Config>, Vec<Fault>)> {
    if text.len() < LONG { None } else { cut(text, THREADS, lookup) }
}

fn cut(text: &str, threads: usize, lookup: Lookup<'_>) -> Option<(Option<Config>, Vec<Fault>)> {
    let split = split::list(text, threads)?;
    let root = around(&split)?;
    let parts = thread::scope(|scope| {
        let spawn =
            |part| thread::Builder::new().spawn_scoped(scope, move || part_of(part, text.len(), lookup));
        let readers: io::Result<Vec<_>> = split.parts.iter().map(spawn).collect();
        readers.ok()?.into_iter().map(|reader| reader.join().ok().flatten()).collect::<Option<Vec<_>>>()
    })?;
    let rows = parts.into_iter().reduce(|mut rows, more| {
        rows.extend(more);
        rows
    })?;
    Some(understand(&root, rows, Reading { faults: Vec::new(), lookup }))
}

/// What is written around the rows, if that is all right and they are what was cut out.
fn around<'a>(split: &'a Split<'_>) -> Option<Node<'a>> {
    let (mut items, mut faults) = (0, Vec::new());
    let mut take = |_, _: &mut Vec<Fault>| items += 1;
    let mut streamed = Streamed::new(&PATH, &mut take);
    let root = yaml::parse(&split.rest, 0, &mut streamed, &mut faults);
    let in_place = streamed.found.is_some_and(|place| place.line == split.line);
    root.filter(|_| in_place && items == 1 && faults.is_empty())
}

/// The rows of a part, if nothing is wrong with them.
fn part_of(part: &Part<'_>, length: usize, lookup: Lookup<'_>) -> Option<Vec<Row>> {
    let (mut reader, mut faults) = (Reader::new(length, lookup), Vec::new());
    let mut take = |item, faults: &mut Vec<Fault>| reader.take(&item, faults);
    let mut streamed = Streamed::new(&[], &mut take);
    let root = yaml::parse(part.text, part.lines_before, &mut streamed, &mut faults);
    // What has a name may be meant elsewhere.
    let is_a_list = root.is_some() && streamed.found.is_some() && !streamed.names;
    (is_a_list && faults.is_empty()).then_some(reader.rows)
}

/// Reads rows and gives them the copies that they share: many have few different terms, and few routes, and those
/// of a tenant stand together as a rule.
struct Reader<'e> {
    rows: Vec<Row>,
    index: usize,
    terms: HashSet<Arc<Terms>, RandomState>,
    routes: HashSet<Arc<str>, RandomState>,
    tenant: Option<Arc<str>>,
    lookup: Lookup<'e>,
}

impl<'e> Reader<'e> {
    /// For the rows of a text of that length.
    fn new(length: usize, lookup: Lookup<'e>) -> Self {
        // Half a million rows are not to be moved again and again while their list grows. Memory that is not
        // written to costs nothing, and no row is shorter than this.
        let most = length / "{tenant: a, capacity: 1, refill_per_second: 1}".len();
        Self {
            rows: Vec::with_capacity(most),
            index: 0,
            terms: HashSet::default(),
            routes: HashSet::default(),
            tenant: None,
            lookup,
        }
    }

    fn take(&mut self, item: &Node<'_>, faults: &mut Vec<Fault>) {
        let mut reading = Reading { faults: std::mem::take(faults), lookup: self.lookup };
        if let Some(row) = decode::row(item, self.index, &mut reading) {
            let row = self.shared(row);
            self.rows.push(row);
        }
        self.index += 1;
        *faults = reading.faults;
    }

    /// The row made of copies.
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

    const ROW: &str = "- {tenant: t1, capacity: 7, refill_per_second: 7}";
    const OTHER: &str = "- {tenant: t2, route: r, capacity: 8, refill_per_second: 5/m}";
    const DEFAULT: &str = "default: {capacity: 1, refill_per_second: 1}";

    /// What may stand in a line: rows as people write them, and whatever else could mislead who cuts a text unread.
    const LINES: [&str; 32] = [
        ROW,
        OTHER,
        DEFAULT,
        "- {tenant: t3, capacity: 9,",
        "  refill_per_second: 9}",
        "- tenant: t4",
        "  route: r",
        "  capacity: 10",
        "  refill_per_second: 10",
        "-",
        "- - a",
        "-\t{tenant: t8, capacity: 1, refill_per_second: 1}",
        "\t- a",
        "- \"t5",
        "  t5\"",
        "- &x {tenant: t6, capacity: 1, refill_per_second: 1}",
        "- {tenant: &x t7, capacity: 1, refill_per_second: 1}",
        "- {tenant: t9, capacity: &n 5, refill_per_second: *n}",
        "- *x",
        "exempt: {tenants: [*x]}",
        "- |",
        "- !t {tenant: t7, capacity: 1, refill_per_second: 1}",
        "- {tenant: \u{e4}, capacity: 0, refill_per_second: 1}",
        "# a remark",
        "# a remark\rwith a line of its own",
        "- {tenant: t1, route: r, capacity: 7, refill_per_second: 7}\r...",
        "",
        "  ",
        "rows:",
        "rows: # again",
        "---",
        "}",
    ];

    /// What may stand before the list.
    const HEADS: [&str; 6] = [
        "rules:\n  rows:\n",
        "rules:\n  rows: # of all tenants\n",
        "rules:\n  exempt: {tenants: [&x a]}\n  rows:  \n",
        "rules: {\n  rows:\n",
        "rules: &x\n  rows:\n",
        "rules:\n  named:\n  rows:\n",
    ];

    fn text(head: &str, lines: &[(&str, usize)]) -> String {
        let mut text = String::from(
            "upstreams: {u: {servers: [127.0.0.1:1]}}\nroutes: [{id: r, match: {path: /}, upstream: u}]\n",
        );
        text.push_str(head);
        for (line, indented) in lines {
            text.push_str(&" ".repeat(*indented));
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    /// Whether a text can be cut; if so, it means the same.
    fn is_cut(text: &str) -> bool {
        let in_parts = cut(text, 3, &|_| None);
        let was_cut = in_parts.is_some();
        if let Some(in_parts) = in_parts {
            assert_eq!(in_parts, at_once(text, &|_| None), "{text}");
        }
        was_cut
    }

    #[test]
    fn rows_are_read_in_parts() {
        for (head, indented) in [(HEADS[0], 2), (HEADS[0], 4), (HEADS[1], 4), (HEADS[2], 6)] {
            let line = |index: usize| ([ROW, OTHER, "# a remark", ""][index % 4], indented);
            let lines: Vec<_> = (0..100).map(line).chain([(DEFAULT, 2)]).collect();
            let text = text(head, &lines);
            assert_eq!(split::list(&text, 3).unwrap().parts.len(), 3);
            assert!(is_cut(&text));
            let (config, faults) = cut(&text, 3, &|_| None).unwrap();
            let rules = config.unwrap().rules;
            assert_eq!((rules.rows.len(), rules.default.value.capacity(), faults.len()), (50, 1, 0));
            let last = rules.rows[49].terms.place.line;
            assert!(text.lines().nth(last as usize - 1).unwrap().contains("t2"));
        }
    }

    /// A fault is told by reading at once; so is what is no plain list of rows.
    #[test]
    fn what_is_not_plain_is_not_cut() {
        let with = |extra: &'static str| text(HEADS[0], &[(ROW, 4), (OTHER, 4), (extra, 4), (ROW, 4)]);
        assert!(is_cut(&with(OTHER)));
        for extra in [
            "- {tenant: t}",
            "- *x",
            "- \"t",
            "- [",
            "- !t a",
            LINES[15],
            LINES[16],
            LINES[17],
            LINES[24],
            LINES[25],
        ] {
            assert!(!is_cut(&with(extra)), "{extra}");
        }
        assert!(!is_cut(&with(ROW).replace("  rows:", "  named:\n    rows:")), "another list");
        assert!(!is_cut(&with(ROW).replace("    -", "-")), "left of its key");
        assert!(
            !is_cut(&text(HEADS[3], &[(ROW, 4), (OTHER, 4), ("}", 0)])),
            "a block list in a flow mapping"
        );
        assert!(!is_cut("rules: {}\n# rows:\n"));
    }

    #[test]
    fn a_long_text_is_cut_and_its_faults_are_told_in_their_places() {
        let row = |index| format!("    - {{tenant: t{index}, capacity: 7, refill_per_second: 7}}\n");
        let mut text = text(HEADS[0], &[]) + &(0..25_000).map(row).collect::<String>();
        assert!(text.len() > LONG && in_parts(&text, &|_| None).is_some());
        text.push_str("    - {tenant: t, capacity: 0, refill_per_second: 7}\n");
        assert!(in_parts(&text, &|_| None).is_none());
        let (_, faults) = at_once(&text, &|_| None);
        assert!(
            faults[0].to_string().starts_with("25005:29: rules.rows[25000].capacity: must be at least 1")
        );
    }

    proptest! {
        #[test]
        fn in_parts_means_the_same_as_at_once(
            head in select(&HEADS[..]),
            lines in vec((select(&LINES[..]), select(&[4_usize, 4, 4, 4, 4, 2, 0, 6][..])), 0..12),
        ) {
            is_cut(&text(head, &lines));
        }

        #[test]
        fn also_where_most_is_plain(
            head in select(&HEADS[..]),
            lines in vec((select(&[ROW, OTHER][..]), Just(4_usize)), 4..30),
            odd in vec((select(&LINES[..]), select(&[4_usize, 2, 0, 6][..]), any::<prop::sample::Index>()), 1..3),
        ) {
            let mut lines = lines;
            for (line, indented, at) in odd {
                lines.insert(at.index(lines.len() + 1), (line, indented));
            }
            is_cut(&text(head, &lines));
        }
    }
}
