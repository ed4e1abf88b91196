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

/// Cuts every line of a text.
pub(crate) fn cut_lines(text: &str, columns: usize) -> String {
    text.split_inclusive('\n')
        .map(|line| match line.strip_suffix('\n') {
            Some(line) => cut(line, columns) + "\n",
            None => cut(line, columns),
        })
        .collect()
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
    }

    #[test]
    fn measures_width_as_on_a_terminal() {
        assert_eq!(align("显卡\tb\nabcde\tc\n"), "显卡   b\nabcde  c\n");
        assert_eq!(align("\u{1b}[31mno\u{1b}[0m\tb\nfine\tc"), "\u{1b}[31mno\u{1b}[0m    b\nfine  c");
    }
}
