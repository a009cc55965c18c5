//! A long list of rows, cut where items begin, so that its parts can be read at the same time.
//!
//! YAML lets nothing of an item stand as far left as the dash that begins it. So a line that begins with a dash in the
//! column of the list is the next item, whatever stands between, and the list can be cut there unread. What does not keep
//! to that, or refers from one part to another, does not parse in parts; then the text is read as a whole.

/// A text whose rows are cut out of it.
pub struct Split<'a> {
    /// The text with an empty list in their place. What comes after stays on its lines.
    pub rest: String,
    /// The line of that list.
    pub line: u32,
    /// The rows.
    pub parts: Vec<Part<'a>>,
}

/// Some of the rows: a list by itself.
pub struct Part<'a> {
    /// What is written.
    pub text: &'a str,
    /// How many lines of the whole text come before.
    pub lines_before: u32,
}

/// What stands before a block list of rows.
const KEY: &str = "rows:\n";

/// Cuts the first list called `rows` into at most `parts`. `None` if there is none that could be cut.
pub fn rows(text: &str, parts: usize) -> Option<Split<'_>> {
    let (key, key_column) =
        text.match_indices(KEY).find_map(|(key, _)| Some((key, alone_at(&text[..key])?)))?;
    let list = key + KEY.len();
    let column = indentation(&text[list..]);
    let line = u32::try_from(text[..list].matches('\n').count()).ok()?;
    let least = (text.len() - list) / parts.max(1);
    let mut cuts: Vec<(usize, u32)> = Vec::new();
    let (mut end, mut lines) = (list, 0);
    for written in text[list..].split_inclusive('\n') {
        let indented = indentation(written);
        match (&written.as_bytes()[indented..], cuts.last()) {
            ([] | [b'\n' | b'#', ..], _) => {}
            (_, Some(_)) if indented > column => {}
            ([b'-', b' ' | b'\n', ..], before) if indented == column => {
                if before.is_none_or(|(start, _)| end - start > least) {
                    cuts.push((end, line + lines));
                }
            }
            _ => break,
        }
        end += written.len();
        lines += 1;
    }
    if cuts.is_empty() || column < key_column {
        return None;
    }
    let ends = cuts.iter().skip(1).map(|(start, _)| *start).chain([end]);
    let parts: Vec<_> = cuts
        .iter()
        .zip(ends)
        .map(|((start, lines_before), end)| Part { text: &text[*start..end], lines_before: *lines_before })
        .collect();
    let rest = [&text[..list - 1], " []", &"\n".repeat(lines as usize + 1), &text[end..]].concat();
    Some(Split { rest, line, parts })
}

fn indentation(text: &str) -> usize {
    text.bytes().take_while(|byte| *byte == b' ').count()
}

/// The column of what comes next, if nothing stands before it in its line.
fn alone_at(before: &str) -> Option<usize> {
    let line = &before[before.rfind('\n').map_or(0, |end| end + 1)..];
    (indentation(line) == line.len()).then_some(line.len())
}
