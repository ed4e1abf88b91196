//! The matrix that `nvidia-smi topo -m` prints, in the forms of all drivers since 2016.

use std::fmt::Write as _;

use tessera_core::gpu_set::GpuSet;
use tessera_core::topology::{Link, Topology};
use tessera_core::units::{Count, GpuIndex};

use crate::foreign::link;

/// A parsed matrix: the links, and the CPUs near each GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmiMatrix {
    /// Links and NUMA nodes.
    pub topology: Topology,
    /// CPU ranges of each GPU as printed, such as `0-19,40-59`, or `None` if the matrix omits them.
    pub cpu_affinity: Vec<Option<String>>,
}

/// Text that is not a matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: found {found}, expected {expected}")]
pub struct BadMatrix {
    /// Line number, counted from 1.
    pub line: usize,
    /// Column number, counted from 1 in characters without terminal escapes.
    pub column: usize,
    /// Text found at this position.
    pub found: String,
    /// Description of the expected text.
    pub expected: String,
}

const CPU_AFFINITY: &str = "CPU Affinity";
const NUMA_AFFINITY: &str = "NUMA Affinity";
/// Column titles of several words. Their boundaries are lost if tabs were converted to blanks.
const TITLES: [&str; 3] = [CPU_AFFINITY, NUMA_AFFINITY, "GPU NUMA ID"];

/// A word and its position.
#[derive(Clone, Debug)]
struct Word {
    text: String,
    line: usize,
    column: usize,
}

/// Parses a matrix. Skips comment lines (`#`), the rows and columns of NICs, and the legend.
pub fn parse(text: &str) -> Result<SmiMatrix, BadMatrix> {
    let mut lines = text.lines().enumerate().map(|(number, line)| words(number + 1, line));
    let header = lines
        .by_ref()
        .find(|words| words.first().is_some_and(|word| !word.text.starts_with('#')))
        .unwrap_or_default();
    let columns = Columns::of(&header, text.lines().count().max(1))?;
    let mut rows: Vec<Option<Row>> = vec![None; columns.gpus.len()];
    let mut last_line = header[0].line;
    for words in lines {
        let Some(name) = words.first() else { continue };
        last_line = name.line;
        // A row that does not start with a GPU of the header is skipped, like the legend.
        let Some(row) = gpu_number(&name.text).and_then(|number| rows.get_mut(number)) else {
            continue;
        };
        if row.is_some() {
            return Err(name.unexpected("each GPU once"));
        }
        *row = Some(columns.row(&words)?);
    }
    let end = Word { text: String::new(), line: last_line + 1, column: 1 };
    let missing = |number: usize| end.unexpected(&format!("a row for GPU{number}"));
    let rows = rows.into_iter().enumerate();
    let rows = rows.map(|(number, row)| row.ok_or_else(|| missing(number))).collect::<Result<Vec<_>, _>>()?;
    assemble(&rows)
}

/// Writes a matrix with tabs, like the drivers. A cell holds the NVLinks of a pair, or else its
/// PCIe level.
#[must_use]
pub fn print(matrix: &SmiMatrix) -> String {
    let topology = &matrix.topology;
    let gpus = || topology.gpus().iter();
    let names: Vec<String> = gpus().map(|gpu| format!("GPU{gpu}")).collect();
    let mut text = format!("\t{}\t{CPU_AFFINITY}\t{NUMA_AFFINITY}\n", names.join("\t"));
    for row in gpus() {
        let cells = gpus().map(|column| {
            if row == column {
                return " X ".to_owned();
            }
            link::abbreviation(topology.link(row, column)).unwrap_or_else(|| NOT_AVAILABLE.to_owned())
        });
        let cells: Vec<String> = cells.collect();
        let cpus = matrix.cpu_affinity.get(row.position()).and_then(Option::as_deref);
        let numa = topology.numa(row).map(|numa| numa.to_string());
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "GPU{row}\t{}\t{}\t{}",
            cells.join("\t"),
            cpus.unwrap_or(NOT_AVAILABLE),
            numa.as_deref().unwrap_or(NOT_AVAILABLE),
        );
    }
    text
}

const NOT_AVAILABLE: &str = "N/A";

/// The columns that the header names.
struct Columns {
    /// GPU of each matrix column in order, or `None` for a NIC.
    matrix: Vec<Option<GpuIndex>>,
    gpus: GpuSet,
    /// Titles of the columns after the matrix.
    trailing: Vec<String>,
}

#[derive(Clone, Debug)]
struct Row {
    name: Word,
    /// Link to each GPU, with the word it was parsed from.
    cells: Vec<(Link, Word)>,
    cpus: Option<String>,
    numa: Option<u16>,
}

impl Columns {
    fn of(header: &[Word], last_line: usize) -> Result<Self, BadMatrix> {
        let expected = "a header line naming GPU0, GPU1, ...";
        let nothing = Word { text: String::new(), line: last_line, column: 1 };
        let first = header.first().ok_or_else(|| nothing.unexpected(expected))?;
        if gpu_number(&first.text) != Some(0) || header.get(1).is_some_and(|word| word.text == "X") {
            return Err(first.unexpected(expected));
        }
        let mut matrix = Vec::new();
        let mut trailing = Vec::new();
        let mut gpus = GpuSet::EMPTY;
        for word in header {
            if TITLES.contains(&word.text.as_str()) {
                trailing.push(word.text.clone());
                continue;
            }
            let Some(number) = gpu_number(&word.text) else {
                matrix.push(None);
                continue;
            };
            if number != gpus.len() || number >= GpuSet::CAPACITY {
                let next =
                    format!("GPU{} (at most {} GPUs, numbered in order)", gpus.len(), GpuSet::CAPACITY);
                return Err(word.unexpected(&next));
            }
            #[expect(clippy::cast_possible_truncation, reason = "below the capacity of a set")]
            let gpu = GpuIndex(number as u8);
            gpus = gpus.with(gpu);
            matrix.push(Some(gpu));
        }
        Ok(Self { matrix, gpus, trailing })
    }

    fn row(&self, words: &[Word]) -> Result<Row, BadMatrix> {
        let (name, rest) = (&words[0], &words[1..]);
        let own = gpu_number(&name.text);
        let mut cells = Vec::with_capacity(self.gpus.len());
        for (position, column) in self.matrix.iter().enumerate() {
            let Some(word) = rest.get(position) else {
                let last = words.last().unwrap_or(name);
                let end =
                    Word { text: String::new(), line: name.line, column: last.column + last.text.len() };
                let missing = self.matrix.len() - position;
                return Err(end.unexpected(&format!("{} for {}", Count(missing, "more cell"), name.text)));
            };
            let Some(gpu) = column else { continue };
            let is_self = own == Some(gpu.position());
            let link = match word.text.as_str() {
                "X" if is_self => Some(Link::default()),
                NOT_AVAILABLE if !is_self => Some(Link::default()),
                "X" => return Err(word.unexpected(&format!("a link: only GPU{gpu} with itself is X"))),
                _ if is_self => return Err(word.unexpected("X, the GPU itself")),
                other => link::parse(other),
            };
            cells.push((link.ok_or_else(|| word.unexpected(link::EXPECTED))?, word.clone()));
        }
        let trailing = |title| {
            let position = self.trailing.iter().position(|name| name == title)?;
            Some(rest.get(self.matrix.len() + position)?.text.as_str()).filter(|text| *text != NOT_AVAILABLE)
        };
        Ok(Row {
            name: name.clone(),
            cells,
            cpus: trailing(CPU_AFFINITY).map(str::to_owned),
            numa: trailing(NUMA_AFFINITY).and_then(|text| text.parse().ok()),
        })
    }
}

fn assemble(rows: &[Row]) -> Result<SmiMatrix, BadMatrix> {
    for (a, row) in rows.iter().enumerate() {
        for (b, other) in rows.iter().enumerate().skip(a + 1) {
            let (there, place) = &other.cells[a];
            if *there != row.cells[b].0 {
                let here = &row.cells[b].1.text;
                return Err(
                    place.unexpected(&format!("{here}, as {} has for {}", row.name.text, other.name.text))
                );
            }
        }
    }
    let numa: Vec<Option<u16>> = rows.iter().map(|row| row.numa).collect();
    let links = Topology::from_pairs(rows.len(), |a, b| rows[a.position()].cells[b.position()].0);
    Ok(SmiMatrix {
        topology: links.with_numa(&numa),
        cpu_affinity: rows.iter().map(|row| row.cpus.clone()).collect(),
    })
}

/// Returns 7 for `GPU7`.
fn gpu_number(word: &str) -> Option<usize> {
    let digits = word.strip_prefix("GPU")?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Splits a line into words and joins the words of a column title.
fn words(line_number: usize, line: &str) -> Vec<Word> {
    let line = without_escapes(line);
    let mut words: Vec<Word> = Vec::new();
    let mut column = 1;
    for (is_blank, run) in runs(&line) {
        if !is_blank {
            let word = Word { text: run.to_owned(), line: line_number, column };
            match words.last_mut() {
                Some(last) if TITLES.iter().any(|title| begins(title, &format!("{} {run}", last.text))) => {
                    last.text = format!("{} {run}", last.text);
                }
                _ => words.push(word),
            }
        }
        column += run.chars().count();
    }
    words
}

/// Returns whether `start` is the whole title or its first words.
fn begins(title: &str, start: &str) -> bool {
    title.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// Splits a line into alternating runs of blanks and of other characters.
fn runs(line: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut rest = line;
    std::iter::from_fn(move || {
        let blank = rest.chars().next()?.is_whitespace();
        let end = rest.find(|next: char| next.is_whitespace() != blank).unwrap_or(rest.len());
        let (run, after) = rest.split_at(end);
        rest = after;
        Some((blank, run))
    })
}

/// Removes terminal escapes (`ESC [ ... letter`), with which drivers underline the header.
fn without_escapes(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line.chars();
    while let Some(next) = rest.next() {
        if next == '\u{1b}' {
            let mut sequence = rest.by_ref().skip_while(|c| *c == '[');
            let _ = sequence.find(char::is_ascii_alphabetic);
        } else {
            text.push(next);
        }
    }
    text
}

impl Word {
    fn unexpected(&self, expected: &str) -> BadMatrix {
        let found = if self.text.is_empty() { "nothing".to_owned() } else { format!("`{}`", self.text) };
        BadMatrix { line: self.line, column: self.column, found, expected: expected.to_owned() }
    }
}

#[cfg(test)]
mod tests;
