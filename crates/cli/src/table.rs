//! Aligns text in columns.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Aligns text in columns like Go's `tabwriter`.
///
/// A cell ends in a tab, and the text after the last tab is not a cell. A cell is two spaces wider
/// than the widest cell of its column in the adjacent lines that have this column. Width is
/// measured as on a terminal: a Chinese character takes two places, a colour code none.
pub(crate) fn align(text: &str) -> String {
    let lines: Vec<Vec<&str>> = text.split('\n').map(|line| line.split('\t').collect()).collect();
    let cells = |line: &Vec<&str>| line.len() - 1;
    let mut widths: Vec<Vec<usize>> = lines.iter().map(|line| vec![0; cells(line)]).collect();
    let columns = lines.iter().map(cells).max().unwrap_or(0);
    for column in 0..columns {
        let mut start = 0;
        while start < lines.len() {
            let end = (start..lines.len()).find(|line| cells(&lines[*line]) <= column).unwrap_or(lines.len());
            let widest = lines[start..end].iter().map(|line| width(line[column])).max().unwrap_or(0);
            widths[start..end].iter_mut().for_each(|line| line[column] = widest + PADDING);
            start = end + 1;
        }
    }
    let mut aligned = Vec::with_capacity(lines.len());
    for (line, widths) in lines.iter().zip(&widths) {
        let mut out = String::new();
        for (position, cell) in line.iter().enumerate() {
            out.push_str(cell);
            if let Some(wide) = widths.get(position) {
                out.extend(std::iter::repeat_n(' ', wide - width(cell)));
            }
        }
        aligned.push(out);
    }
    aligned.join("\n")
}

const PADDING: usize = 2;

/// Returns the number of places that text takes on a terminal.
pub(crate) fn width(text: &str) -> usize {
    if !text.contains(ESCAPE) {
        return text.width();
    }
    let mut parts = text.split(ESCAPE);
    let plain = parts.next().map_or(0, |part| part.width());
    plain + parts.map(|part| part.split_once('m').map_or(part, |(_, rest)| rest).width()).sum::<usize>()
}

/// Cuts text after `columns` places of a terminal. A cut text ends in an ellipsis, and its colour ends too.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let (mut kept, mut places, mut in_escape, mut has_colour) = (String::new(), 0, false, false);
    for letter in text.chars() {
        if letter == ESCAPE || in_escape {
            in_escape = letter != 'm';
            has_colour = true;
            kept.push(letter);
            continue;
        }
        let wide = letter.width().unwrap_or(0);
        if places + wide + 1 > columns {
            break;
        }
        places += wide;
        kept.push(letter);
    }
    if columns > 0 {
        kept.push('…');
    }
    if has_colour {
        kept.push_str("\u{1b}[0m");
    }
    kept
}

/// Cuts text in the middle, so that `columns` places of a terminal suffice. Names of pods differ at the end, after the
/// name of what they belong to. Text with colours is cut at the end.
fn cut_middle(text: &str, columns: usize) -> String {
    if width(text) <= columns || text.contains(ESCAPE) || columns < 3 {
        return cut(text, columns);
    }
    let taken = |letters: &mut dyn Iterator<Item = char>, room: usize| {
        let mut places = 0;
        let fits = |letter: &char| {
            places += letter.width().unwrap_or(0);
            places <= room
        };
        letters.take_while(fits).collect::<String>()
    };
    let end = taken(&mut text.chars().rev(), (columns - 1).div_ceil(2));
    let begin = taken(&mut text.chars(), columns - 1 - width(&end));
    format!("{begin}…{}", end.chars().rev().collect::<String>())
}

/// Cuts every line of a text.
pub(crate) fn cut_lines(text: &str, columns: usize) -> String {
    text.split_inclusive('\n')
        .map(|line| match line.strip_suffix('\n') {
            Some(line) => cut(line, columns) + "\n",
            None => cut(line, columns),
        })
        .collect()
}

/// A column of names, which are cut in the middle on a narrow terminal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameColumn {
    pub(crate) column: usize,
    /// Width to which the names are cut only if all other names are as short as they can be.
    pub(crate) preferred: usize,
}

/// Returns how many places of a terminal the widest line takes.
pub(crate) fn widest(text: &str) -> usize {
    text.lines().map(width).max().unwrap_or(0)
}

/// Aligns text in columns like [`align`]. If a line is wider than `columns`, the widest columns of `names` are cut, so
/// that the other columns stay whole.
pub(crate) fn align_within(text: &str, columns: Option<usize>, names: &[NameColumn]) -> String {
    let Some(columns) = columns else { return align(text) };
    let lines: Vec<Vec<&str>> = text.split('\n').map(|line| line.split('\t').collect()).collect();
    // The text after the last tab takes part in the width, but only where the line has all columns.
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths = vec![0; count];
    for line in lines.iter().filter(|line| line.len() == count) {
        widths.iter_mut().zip(line).for_each(|(widest, cell)| *widest = width(cell).max(*widest));
    }
    let total = |widths: &[usize]| widths.iter().sum::<usize>() + PADDING * widths.len().saturating_sub(1);
    while total(&widths) > columns {
        let widest_above = |least: &dyn Fn(&NameColumn) -> usize| {
            let may_shrink =
                |name: &&NameColumn| widths.get(name.column).is_some_and(|wide| *wide > least(name));
            names.iter().filter(may_shrink).max_by_key(|name| widths[name.column]).map(|name| name.column)
        };
        let Some(widest) =
            widest_above(&|name| name.preferred.max(MIN_CELL)).or_else(|| widest_above(&|_| MIN_CELL))
        else {
            break;
        };
        widths[widest] -= 1;
    }
    let fitted = |line: &Vec<&str>| {
        let cells = line.iter().enumerate().map(|(column, cell)| {
            let is_cell = column + 1 < line.len() || line.len() == count;
            let is_name = is_cell && names.iter().any(|name| name.column == column);
            if is_name { cut_middle(cell, widths[column]) } else { (*cell).to_owned() }
        });
        cells.collect::<Vec<_>>().join("\t")
    };
    align(&lines.iter().map(fitted).collect::<Vec<_>>().join("\n"))
}

/// Narrowest width to which a column is cut.
const MIN_CELL: usize = 8;

/// Wraps lines at spaces, and words that are wider than the terminal anywhere, so that no text is lost. The parts of a
/// line are indented below its text.
pub(crate) fn wrap_lines(text: &str, columns: usize) -> String {
    text.lines().map(|line| wrap(line, columns) + "\n").collect()
}

fn wrap(line: &str, columns: usize) -> String {
    if width(line) <= columns {
        return line.to_owned();
    }
    // The branches of a tree, or the number in the first column of a table.
    let lead = line.find(|c: char| !" |`-0123456789".contains(c)).unwrap_or(0);
    let has_number = line[..lead].contains(|c: char| c.is_ascii_digit());
    let indent = " ".repeat((lead + if has_number { 0 } else { PADDING }).min(columns / 2));
    let (mut wrapped, mut part) = (String::new(), String::new());
    let mut end_line = |part: &mut String| {
        wrapped = std::mem::take(&mut wrapped) + part.trim_end() + "\n";
        part.clone_from(&indent);
    };
    for word in line.split_inclusive(' ') {
        if width(&part) + width(word.trim_end()) > columns && !part.trim().is_empty() {
            end_line(&mut part);
        }
        if width(&part) + width(word.trim_end()) <= columns || word.contains(ESCAPE) {
            part.push_str(word);
            continue;
        }
        for letter in word.trim_end().chars() {
            if width(&part) + letter.width().unwrap_or(0) > columns {
                end_line(&mut part);
            }
            part.push(letter);
        }
        part.push(' ');
    }
    let last = cut(part.trim_end(), columns);
    wrapped + &last
}

const ESCAPE: char = '\u{1b}';

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_a_cell_ends_the_column() {
        assert_eq!(align("a\tb\nlonger\tc\n\nx\ty\t\n"), "a       b\nlonger  c\n\nx  y  \n");
        assert_eq!(align("k:\tv\n\nNAME\tB\t\nn\t\t\n"), "k:  v\n\nNAME  B  \nn        \n");
    }

    #[test]
    fn cuts_lines_at_the_width_of_the_terminal() {
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("显卡显卡", 5), "显卡…");
        assert_eq!(cut("\u{1b}[31mabcdef\u{1b}[0m", 3), "\u{1b}[31mab…\u{1b}[0m");
        assert_eq!(cut_lines("abcdef\nab\n", 3), "ab…\nab\n");
        assert_eq!(cut_middle("abcdef", 6), "abcdef");
        assert_eq!(cut_middle("abcdef", 5), "ab…ef");
        assert_eq!(cut_middle("abcdef", 4), "a…ef");
        assert_eq!(cut_middle("显卡显卡", 5), "显…卡");
    }

    #[test]
    fn wraps_lines_below_their_text() {
        assert_eq!(wrap_lines("short\n", 10), "short\n");
        assert_eq!(wrap_lines("one two three four", 9), "one two\n  three\n  four\n");
        assert_eq!(wrap_lines("12  node has the taint\n", 14), "12  node has\n    the taint\n");
        assert_eq!(wrap_lines("|   `-- GPU0 a b", 14), "|   `-- GPU0 a\n       b\n");
        assert_eq!(wrap_lines("a verylongword b", 6), "a\n  very\n  long\n  word\n  b\n");
    }

    #[test]
    fn cuts_only_flexible_columns_to_the_width() {
        let text =
            "NODE\tPOD\tBUSY\na-long-node-name\ta-longer-name-of-a-pod\t30%\nn2\tno answer from this node\n";
        let names =
            |preferred| [(0, 8), (1, preferred)].map(|(column, preferred)| NameColumn { column, preferred });
        assert_eq!(align_within(text, None, &names(8)), align(text));
        assert_eq!(align_within(text, Some(100), &names(8)), align(text));
        for (columns, preferred, expected) in [
            (30, 8, "a-lon…-name  a-lon…a-pod  30%"),
            (36, 20, "a-l…name  a-longer-…e-of-a-pod  30%"),
            (24, 20, "a-l…name  a-l…-pod  30%"),
        ] {
            let narrow = align_within(text, Some(columns), &names(preferred));
            let lines: Vec<&str> = narrow.lines().collect();
            assert!(lines[..2].iter().all(|line| width(line) <= columns), "{narrow}");
            assert_eq!(lines[1], expected, "{columns} {preferred}");
            assert!(lines[2].ends_with("no answer from this node"), "{narrow}");
        }
    }

    #[test]
    fn measures_width_as_on_a_terminal() {
        assert_eq!(align("显卡\tb\nabcde\tc\n"), "显卡   b\nabcde  c\n");
        assert_eq!(align("\u{1b}[31mno\u{1b}[0m\tb\nfine\tc"), "\u{1b}[31mno\u{1b}[0m    b\nfine  c");
    }
}
