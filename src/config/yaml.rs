//! YAML text to a tree of nodes that know their places. Scalars stay text: what `200` or `off`
//! means is for the field that reads it to say, so no value is guessed into another type.

use std::borrow::Cow;

use granit_parser::{Event, Marker, Parser, ScalarStyle};

use super::fault::{Fault, Place};

/// Nodes that aliases may add in all; enough for people, too few for a "billion laughs".
const MOST_ALIASED_NODES: usize = 10_000;

/// A node with its place.
#[derive(Clone, Debug)]
pub struct Node<'a> {
    /// Where it begins.
    pub place: Place,
    /// What it is.
    pub kind: Kind<'a>,
}

/// What a node is.
#[derive(Clone, Debug)]
pub enum Kind<'a> {
    /// A scalar as written; `plain` if without quotes.
    Scalar {
        /// The text.
        text: Cow<'a, str>,
        /// Written without quotes.
        plain: bool,
    },
    /// A list.
    Sequence(Vec<Node<'a>>),
    /// A mapping in the order of the file; keys are unique.
    Mapping(Vec<(Text<'a>, Node<'a>)>),
}

/// A key of a mapping with its place.
#[derive(Clone, Debug)]
pub struct Text<'a> {
    /// Where it begins.
    pub place: Place,
    /// The key.
    pub text: Cow<'a, str>,
}

impl Node<'_> {
    /// Nothing was written here: an empty value, `~` or `null`.
    pub fn is_null(&self) -> bool {
        matches!(&self.kind, Kind::Scalar { text, plain: true } if matches!(&**text, "" | "~" | "null"))
    }

    /// The text of a field as it is written, where this is a mapping that has it.
    pub fn text_of(&self, field: &str) -> Option<Box<str>> {
        let Kind::Mapping(entries) = &self.kind else { return None };
        let (_, value) = entries.iter().find(|(key, _)| key.text == field)?;
        match &value.kind {
            Kind::Scalar { text, .. } => Some(text.as_ref().into()),
            _ => None,
        }
    }

    /// What this is, for a message.
    pub fn describe(&self) -> String {
        match &self.kind {
            _ if self.is_null() => "nothing".into(),
            Kind::Scalar { text, .. } => format!("`{}`", shorten(text)),
            Kind::Sequence(_) => "a list".into(),
            Kind::Mapping(_) => "a mapping".into(),
        }
    }
}

/// A text short enough for a message.
pub fn shorten(text: &str) -> String {
    const MOST: usize = 60;
    let mut short: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().count() > MOST {
        short.push_str("...");
    }
    short
}

/// Where a document has a list that is not kept: each item is handed over as soon as it is read, and
/// what is left in the tree is an empty list. Half a million rows need no half a million nodes.
pub struct Streamed<'r, 'a> {
    /// The keys that lead to the list.
    pub path: &'r [&'r str],
    /// Takes an item.
    pub take: &'r mut dyn FnMut(Node<'a>, &mut Vec<Fault>),
    /// Where the first such list was.
    pub found: Option<Place>,
    /// Whether anything in the document has a name (an anchor).
    pub names: bool,
}

impl<'r, 'a> Streamed<'r, 'a> {
    /// What stands under `path` goes to `take`.
    pub fn new(path: &'r [&'r str], take: &'r mut dyn FnMut(Node<'a>, &mut Vec<Fault>)) -> Self {
        Self { path, take, found: None, names: false }
    }
}

/// Parses one document, which begins after so many lines of its file. Syntax faults end the reading, duplicate keys
/// do not.
pub fn parse<'a>(
    text: &'a str,
    lines_before: u32,
    streamed: &mut Streamed<'_, 'a>,
    faults: &mut Vec<Fault>,
) -> Option<Node<'a>> {
    let path = streamed.path;
    let parser = Parser::new_from_str(text);
    let mut reader = Reader { parser, lines_before, anchors: Vec::new(), aliased: 0, streamed, faults };
    match reader.document(path) {
        Ok(node) => node,
        Err(fault) => {
            reader.faults.push(fault);
            None
        }
    }
}

struct Reader<'a, 'r, 'p> {
    parser: Parser<'a, granit_parser::StrInput<'a>>,
    lines_before: u32,
    anchors: Vec<(usize, Node<'a>)>,
    aliased: usize,
    streamed: &'r mut Streamed<'p, 'a>,
    faults: &'r mut Vec<Fault>,
}

impl<'a, 'p> Reader<'a, '_, 'p> {
    fn next(&mut self) -> Result<(Event<'a>, Place), Fault> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => Ok((event, self.place(span.start))),
            Some(Err(error)) => {
                Err(Fault::new(self.place(*error.marker()), "", format!("not YAML: {}", error.info())))
            }
            None => Ok((Event::StreamEnd, Place::default())),
        }
    }

    fn place(&self, marker: Marker) -> Place {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let line = number(marker.line()).max(1).saturating_add(self.lines_before);
        Place { line, column: number(marker.col()).saturating_add(1) }
    }

    fn document(&mut self, path: &'p [&'p str]) -> Result<Option<Node<'a>>, Fault> {
        let mut root = None;
        loop {
            let (event, place) = self.next()?;
            match event {
                Event::StreamEnd => return Ok(root),
                Event::StreamStart | Event::DocumentEnd => {}
                Event::DocumentStart(..) if root.is_some() => {
                    return Err(Fault::new(place, "", "expected one document, and here a second one begins"));
                }
                Event::DocumentStart(..) => {
                    let (event, place) = self.next()?;
                    root = Some(self.node(event, place, Some(path))?);
                }
                _ => return Err(Fault::new(place, "", "not YAML: a value outside of a document")),
            }
        }
    }

    /// The node that `event` begins; `path` leads from it to the rows, if they are below. The parser
    /// bounds the depth, so recursion is bounded.
    fn node(
        &mut self,
        event: Event<'a>,
        place: Place,
        path: Option<&'p [&'p str]>,
    ) -> Result<Node<'a>, Fault> {
        let (kind, anchor, tag) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                (Kind::Scalar { text, plain: style == ScalarStyle::Plain }, anchor, tag)
            }
            Event::SequenceStart(_, anchor, tag) => {
                // What has a name may be asked for again, and is kept.
                let here = path.is_some_and(<[_]>::is_empty) && anchor == 0;
                self.streamed.found = self.streamed.found.or(here.then_some(place));
                (Kind::Sequence(if here { self.hand_over()? } else { self.sequence()? }), anchor, tag)
            }
            Event::MappingStart(_, anchor, tag) => {
                (Kind::Mapping(self.mapping(path.filter(|_| anchor == 0))?), anchor, tag)
            }
            Event::Alias(id) => return self.alias(id, place),
            _ => return Err(Fault::new(place, "", "not YAML: expected a value")),
        };
        if let Some(tag) = tag {
            self.faults.push(Fault::new(
                place,
                "",
                format!("tags such as `{}` mean nothing here", tag.original()),
            ));
        }
        let node = Node { place, kind };
        if anchor > 0 {
            self.streamed.names = true;
            self.anchors.push((anchor, node.clone()));
        }
        Ok(node)
    }

    fn sequence(&mut self) -> Result<Vec<Node<'a>>, Fault> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, place) => items.push(self.node(event, place, None)?),
            }
        }
    }

    fn hand_over(&mut self) -> Result<Vec<Node<'a>>, Fault> {
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Vec::new()),
                (event, place) => {
                    let item = self.node(event, place, None)?;
                    (self.streamed.take)(item, self.faults);
                }
            }
        }
    }

    fn mapping(&mut self, path: Option<&'p [&'p str]>) -> Result<Vec<(Text<'a>, Node<'a>)>, Fault> {
        let mut entries: Vec<(Text<'a>, Node<'a>)> = Vec::new();
        loop {
            let (event, place) = self.next()?;
            if matches!(event, Event::MappingEnd) {
                return Ok(entries);
            }
            let key = self.node(event, place, None)?;
            let (event, place) = self.next()?;
            let below = match (&key.kind, path) {
                (Kind::Scalar { text, .. }, Some([first, rest @ ..])) if text == first => Some(rest),
                _ => None,
            };
            let value = self.node(event, place, below)?;
            let Kind::Scalar { text, .. } = key.kind else {
                self.faults.push(Fault::new(key.place, "", "a key must be a plain word"));
                continue;
            };
            if let Some((first, _)) = entries.iter().find(|(known, _)| known.text == text) {
                let message = format!("duplicate key `{}`, first written at {}", shorten(&text), first.place);
                self.faults.push(Fault::new(key.place, "", message));
                continue;
            }
            entries.push((Text { place: key.place, text }, value));
        }
    }

    fn alias(&mut self, id: usize, place: Place) -> Result<Node<'a>, Fault> {
        let node = self.anchors.iter().find(|(anchor, _)| *anchor == id).map(|(_, node)| node.clone());
        let Some(node) = node else {
            return Err(Fault::new(place, "", "an alias to a value that contains it"));
        };
        self.aliased += count(&node);
        if self.aliased > MOST_ALIASED_NODES {
            let message = format!("aliases add more than {MOST_ALIASED_NODES} values");
            return Err(Fault::new(place, "", message));
        }
        Ok(node)
    }
}

fn count(node: &Node<'_>) -> usize {
    match &node.kind {
        Kind::Scalar { .. } => 1,
        Kind::Sequence(items) => 1 + items.iter().map(count).sum::<usize>(),
        Kind::Mapping(entries) => 1 + entries.iter().map(|(_, value)| count(value)).sum::<usize>(),
    }
}
