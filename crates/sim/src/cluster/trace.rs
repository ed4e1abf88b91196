//! Clusters and workloads in the format of the openb trace: CSV with a header line.

use std::collections::HashMap;
use std::str::FromStr;

use csv::{ReaderBuilder, StringRecord, Trim};
use tessera_core::gpu::{Gpu, Model};
use tessera_core::node::{BadNode, Node};
use tessera_core::request::{ContainerRequest, ContainerRole, PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};

use super::pod::{PodSize, SimPod};

/// Reasons why a file of a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The header lacks a column.
    #[error("line 1: no column {0:?} in the header; expected a file of the openb trace")]
    Column(&'static str),
    /// A cell has an unexpected value.
    #[error("line {line}, column {column:?}: found {found:?}, expected {expected}")]
    Cell {
        /// Line in the file, counted from 1.
        line: u64,
        /// Title of the column.
        column: &'static str,
        /// Text of the cell.
        found: String,
        /// Description of the expected value.
        expected: &'static str,
    },
    /// A quoted cell has no end, so it swallows the rest of the file.
    #[error("line {0}: a quoted cell begins here and does not end; add the closing quote")]
    UnclosedQuote(u64),
    /// The text is not valid CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// A line does not describe a valid node.
    #[error("line {line}: {source}")]
    Node {
        /// Line in the file, counted from 1.
        line: u64,
        /// The reason.
        source: BadNode,
    },
}

/// Memory of every GPU. The trace does not record GPU memory, so shares request none of it.
const GPU_MEMORY: MiB = MiB(16_384);

/// Reads a node list. `topology` returns the links of a node by model and number of GPUs, if they
/// are known.
pub fn nodes(
    text: &str,
    topology: impl Fn(&Model, usize) -> Option<Topology>,
) -> Result<Vec<Node>, TraceError> {
    let table = Table::read(text)?;
    let (name, cpu, memory) = (table.column("sn")?, table.column("cpu_milli")?, table.column("memory_mib")?);
    let (count, model) = (table.column("gpu")?, table.column("model")?);
    let mut nodes = Vec::new();
    for row in &table.rows {
        let gpu_count: u8 = row.number(&count)?;
        let model = Model::from(row.text(&model));
        let gpus = (0..gpu_count).map(|index| {
            Gpu::new(
                GpuIndex(index),
                format!("GPU-{}-{index}", row.text(&name)).as_str().into(),
                model.clone(),
                GPU_MEMORY,
            )
        });
        let gpu_count = usize::from(gpu_count);
        let node = Node::new(
            row.text(&name).into(),
            gpus.collect(),
            topology(&model, gpu_count).unwrap_or_else(|| Topology::unknown(gpu_count)),
            MilliCpu(row.number(&cpu)?),
            MiB(row.number(&memory)?),
        );
        nodes.push(node.map_err(|source| TraceError::Node { line: row.line, source })?);
    }
    Ok(nodes)
}

/// Reads a pod list and sorts it by name.
pub fn pods(text: &str) -> Result<Vec<SimPod>, TraceError> {
    let table = Table::read(text)?;
    let (name, cpu, memory) =
        (table.column("name")?, table.column("cpu_milli")?, table.column("memory_mib")?);
    let (gpu_count, share) = (table.column("num_gpu")?, table.column("gpu_milli")?);
    let models = table.column("gpu_spec").ok();
    let mut pods = Vec::new();
    for row in &table.rows {
        let gpu_count: u8 = row.number(&gpu_count)?;
        let milli: u32 = row.number(&share)?;
        let (request, size, percent) = match (gpu_count, milli) {
            (0, _) => (None, PodSize::None, 0),
            (1, 1..1000) => {
                let compute_percent = Percent(milli.div_ceil(10).min(99));
                (Some(Request::share(compute_percent, MiB::ZERO)), PodSize::Share, compute_percent.0)
            }
            (_, 1000) => {
                let size = match gpu_count {
                    1 => PodSize::One,
                    2 => PodSize::Two,
                    3 | 4 => PodSize::Four,
                    _ => PodSize::Eight,
                };
                (Some(Request::Whole(gpu_count)), size, 100 * u32::from(gpu_count))
            }
            _ => return Err(row.unexpected(&share, "1000, or less with one GPU")),
        };
        let spec = models.as_ref().map_or("", |column| row.text(column));
        let models = spec.split('|').filter(|model| !model.is_empty() && request.is_some()).map(Model::from);
        let container = |request| ContainerRequest {
            name: "main".to_owned(),
            role: ContainerRole::Main,
            request: Some(request),
        };
        pods.push(SimPod {
            name: row.text(&name).to_owned(),
            request: PodRequest {
                containers: request.map(container).into_iter().collect(),
                cpu: MilliCpu(row.number(&cpu)?),
                memory: MiB(row.number(&memory)?),
                models: models.collect(),
                ..PodRequest::default()
            },
            size,
            percent,
        });
    }
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(pods)
}

/// A table with its header line.
struct Table {
    columns: HashMap<String, usize>,
    rows: Vec<Row>,
}

struct Column {
    title: &'static str,
    position: usize,
}

struct Row {
    /// Line in the file, counted from 1.
    line: u64,
    cells: StringRecord,
}

impl Table {
    fn read(text: &str) -> Result<Self, TraceError> {
        if let Some(line) = unclosed_quote(text) {
            return Err(TraceError::UnclosedQuote(line));
        }
        let mut reader = ReaderBuilder::new().trim(Trim::All).flexible(true).from_reader(text.as_bytes());
        let titles = reader.headers()?.iter().enumerate();
        let columns = titles.map(|(position, title)| (title.to_owned(), position)).collect();
        let mut rows = Vec::new();
        for cells in reader.into_records() {
            let cells = cells?;
            if cells.iter().any(|cell| !cell.is_empty()) {
                rows.push(Row { line: line_of(text, &cells), cells });
            }
        }
        Ok(Self { columns, rows })
    }

    fn column(&self, title: &'static str) -> Result<Column, TraceError> {
        let position = *self.columns.get(title).ok_or(TraceError::Column(title))?;
        Ok(Column { title, position })
    }
}

/// Returns the line, counted from 1, of a quote that opens a cell and is never closed. The CSV reader
/// ends such a cell at the end of the text without an error.
fn unclosed_quote(text: &str) -> Option<u64> {
    let (mut line, mut opened_at, mut starts_cell) = (1, None, true);
    let mut bytes = text.bytes().peekable();
    while let Some(byte) = bytes.next() {
        match (byte, opened_at) {
            (b'"', None) if starts_cell => opened_at = Some(line),
            // Two quotes in a quoted cell stand for one.
            (b'"', Some(_)) if bytes.peek() == Some(&b'"') => {
                bytes.next();
            }
            (b'"', Some(_)) => opened_at = None,
            _ => {}
        }
        starts_cell = opened_at.is_none() && matches!(byte, b',' | b'\n' | b'\r');
        line += u64::from(byte == b'\n');
    }
    opened_at
}

/// Returns the line of a record. The reader counts empty lines before a record as part of it.
fn line_of(text: &str, record: &StringRecord) -> u64 {
    let Some(position) = record.position() else { return 0 };
    let start = usize::try_from(position.byte()).unwrap_or(text.len());
    let rest = text.as_bytes().get(start..).unwrap_or_default();
    let line_ends = rest.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
    position.line() + line_ends.filter(|byte| **byte == b'\n').count() as u64
}

impl Row {
    fn text(&self, column: &Column) -> &str {
        self.cells.get(column.position).unwrap_or("")
    }

    fn number<N: FromStr>(&self, column: &Column) -> Result<N, TraceError> {
        self.text(column).parse().map_err(|_| self.unexpected(column, "a whole number that fits"))
    }

    fn unexpected(&self, column: &Column, expected: &'static str) -> TraceError {
        TraceError::Cell {
            line: self.line,
            column: column.title,
            found: self.text(column).to_owned(),
            expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_nodes_and_pods_of_every_kind() {
        let nodes =
            nodes("sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\nn0,32000,1024,0,\n", |_, _| {
                None
            })
            .unwrap();
        assert_eq!((nodes[0].gpus().len(), nodes[1].gpus().len()), (2, 0));
        let pods = pods(
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n\
             b,12000,16384,1,460,V100M16|V100M32,LS\na,1,2,8,1000,,\nc,1,2,0,0,,\nd,1,2,1,1000,,\n",
        )
        .unwrap();
        let read: Vec<_> = pods.iter().map(|pod| (pod.name.as_str(), pod.size, pod.percent)).collect();
        assert_eq!(
            read,
            [
                ("a", PodSize::Eight, 800),
                ("b", PodSize::Share, 46),
                ("c", PodSize::None, 0),
                ("d", PodSize::One, 100)
            ]
        );
        assert_eq!(pods[1].request.models, ["V100M16".into(), "V100M32".into()]);
        assert!(!pods[2].request.wants_gpu());
    }

    #[test]
    fn errors_name_the_line_the_column_and_the_expected_value() {
        let error = |text: &str| pods(text).unwrap_err().to_string();
        assert!(error("").starts_with("line 1: no column \"name\" in the header"));
        let header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n";
        assert_eq!(
            error(&format!("{header}a,1,2,x,0\n")),
            "line 2, column \"num_gpu\": found \"x\", expected a whole number that fits"
        );
        assert_eq!(
            error(&format!("{header}a,1,2,1,1000\n\nb,1,2,2,500\n")),
            "line 4, column \"gpu_milli\": found \"500\", expected 1000, or less with one GPU"
        );
        assert_eq!(
            error(&format!("{header}a,1,2,1,1000\r\n \r\n\r\nb,1,2\r\n")),
            "line 5, column \"num_gpu\": found \"\", expected a whole number that fits"
        );
    }

    #[test]
    fn a_quote_without_an_end_is_an_error() {
        let header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n";
        let read = |rows: &str| pods(&format!("{header}{rows}")).map(|pods| pods.len());
        let text = "line 3: a quoted cell begins here and does not end; add the closing quote";
        for rows in
            ["a,1,2,0,0\n\"b,1,2,0,0\nc,1,2,0,0\n", "a,1,2,0,0\n\"b\"\",1,2,0,0\n", "a,1,2,0,0\nb,\"1"]
        {
            assert_eq!(read(rows).unwrap_err().to_string(), text, "{rows}");
        }
        for rows in ["\"a\",1,2,0,0\nb\"c,1,2,0,0\n", "\"a\"\"\nb\",\"1\",2,0,0\n\"\",1,2,0,0\n"] {
            assert_eq!(read(rows).unwrap(), 2, "{rows}");
        }
    }
}
