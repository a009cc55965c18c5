//! A long list of rows, cut where items begin, so that its parts can be read at the same time.
//!
//! In a block list a line that begins with a dash in the column of the list is the next item. Only a quoted text or a
//! flow collection that is still open could make something else of it; then the part before it does not end, which is an
//! error, and the text is read as a whole. So is what has a name for another part to use.

/// A text whose rows are cut out of it.
pub struct Split<'a> {
    /// The text with one empty item in their place. What comes after stays on its lines.
    pub rest: String,
    /// The line of that item.
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

/// Cuts the first block list under a key `rows` into at most `parts`. `None` if there is none that could be cut.
pub fn list(text: &str, parts: usize) -> Option<Split<'_>> {
    // To YAML a carriage return alone ends a line, too.
    if text.contains('\r') {
        return None;
    }
    let (key_column, list) =
        text.match_indices("rows:").find_map(|(at, key)| key_alone(text, at, key.len()))?;
    let column = indentation(&text[list..]);
    let first = u32::try_from(text[..list].matches('\n').count()).ok()?;
    let least = (text.len() - list) / parts;
    let mut cuts: Vec<(usize, u32)> = Vec::new();
    let (mut end, mut lines) = (list, 0);
    for written in text[list..].split_inclusive('\n') {
        let indented = indentation(written);
        match (&written.as_bytes()[indented..], cuts.last()) {
            ([] | [b'\n' | b'#', ..], _) => {}
            (_, Some(_)) if indented > column => {}
            ([b'-', b' ' | b'\n', ..], before) if indented == column => {
                if before.is_none_or(|(start, _)| end - start > least) {
                    cuts.push((end, first + lines));
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
    // An item, so that whatever could not stand before or after a block list cannot stand here either.
    let item = format!("{}- ''{}", " ".repeat(column), "\n".repeat(lines as usize));
    Some(Split { rest: [&text[..list], &item, &text[end..]].concat(), line: first + 1, parts })
}

/// The column of a key, and where its line ends, if nothing but a remark is beside it.
fn key_alone(text: &str, at: usize, length: usize) -> Option<(usize, usize)> {
    let line = &text[text[..at].rfind('\n').map_or(0, |end| end + 1)..at];
    let rest = &text[at + length..];
    let rest = &rest[..=rest.find('\n')?];
    let beside = rest.trim_start_matches(' ');
    let is_alone = beside == "\n" || beside.starts_with('#') && rest.starts_with(' ');
    (is_alone && indentation(line) == line.len()).then_some((line.len(), at + length + rest.len()))
}

fn indentation(text: &str) -> usize {
    text.bytes().take_while(|byte| *byte == b' ').count()
}
