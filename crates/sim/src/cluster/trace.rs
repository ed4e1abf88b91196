//! Clusters and workloads as the openb trace writes them: comma-separated, with a header line.

use std::collections::HashMap;

use tessera_core::gpu::{Gpu, Model};
use tessera_core::node::{BadNode, Node};
use tessera_core::request::{ContainerRequest, ContainerRole, PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};

/// A pod of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePod {
    /// Its name.
    pub name: String,
    /// What it asks for.
    pub request: PodRequest,
    /// By what it is counted.
    pub size: PodSize,
    /// All it asks of GPUs together, in percent of one.
    pub percent: u32,
}

/// Pods are reported by what they ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodSize {
    /// No GPU.
    None,
    /// Part of one.
    Share,
    /// One GPU.
    One,
    /// Two.
    Two,
    /// Three or four.
    Four,
    /// More.
    Eight,
}

/// A file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// No such column.
    #[error("line 1: no column {0:?} in the header; expected a file of the openb trace")]
    Column(&'static str),
    /// A cell that says something else than it should.
    #[error("line {line}, column {column:?}: found {found:?}, expected {expected}")]
    Cell {
        /// Counted from 1.
        line: usize,
        /// By its title.
        column: &'static str,
        /// What stands there.
        found: String,
        /// What should.
        expected: &'static str,
    },
    /// A node that cannot be.
    #[error("line {line}: {source}")]
    Node {
        /// Counted from 1.
        line: usize,
        /// Why not.
        source: BadNode,
    },
}

/// The trace knows no memory of GPUs; every GPU has this much, and shares ask for none of it.
const GPU_MEMORY: MiB = MiB(16_384);

impl PodSize {
    /// All sizes that ask for GPUs, smallest first.
    pub const WITH_GPUS: [Self; 5] = [Self::Share, Self::One, Self::Two, Self::Four, Self::Eight];

    /// As results call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Share => "share",
            Self::One => "1",
            Self::Two => "2",
            Self::Four => "4",
            Self::Eight => "8",
        }
    }
}

/// Reads a node list. `topology` gives the links of a node by its model and number of GPUs, where known.
pub fn nodes(
    text: &str,
    topology: impl Fn(&Model, usize) -> Option<Topology>,
) -> Result<Vec<Node>, TraceError> {
    let table = Table::new(text);
    let (name, cpu, memory) = (table.column("sn")?, table.column("cpu_milli")?, table.column("memory_mib")?);
    let (count, model) = (table.column("gpu")?, table.column("model")?);
    let mut nodes = Vec::new();
    for row in table.rows() {
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

/// Reads a pod list, sorted by name.
pub fn pods(text: &str) -> Result<Vec<TracePod>, TraceError> {
    let table = Table::new(text);
    let (name, cpu, memory) =
        (table.column("name")?, table.column("cpu_milli")?, table.column("memory_mib")?);
    let (gpu_count, share) = (table.column("num_gpu")?, table.column("gpu_milli")?);
    let models = table.column("gpu_spec").ok();
    let mut pods = Vec::new();
    for row in table.rows() {
        let gpu_count: u8 = row.number(&gpu_count)?;
        let milli: u32 = row.number(&share)?;
        let (request, size, percent) = match (gpu_count, milli) {
            (0, _) => (None, PodSize::None, 0),
            (1, 1..1000) => {
                let compute_percent = Percent(milli.div_ceil(10).min(99));
                (
                    Some(Request::Share { compute_percent, memory: MiB::ZERO }),
                    PodSize::Share,
                    compute_percent.0,
                )
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
        pods.push(TracePod {
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

struct Table<'a> {
    columns: HashMap<&'a str, usize>,
    body: Vec<(usize, &'a str)>,
}

struct Column {
    title: &'static str,
    position: usize,
}

struct Row<'a> {
    line: usize,
    cells: Vec<&'a str>,
}

impl<'a> Table<'a> {
    fn new(text: &'a str) -> Self {
        let mut lines = text.lines().enumerate().map(|(number, line)| (number + 1, line));
        let header = lines.next().map_or("", |(_, line)| line);
        let columns = header.split(',').enumerate().map(|(position, title)| (title.trim(), position));
        Self { columns: columns.collect(), body: lines.filter(|(_, line)| !line.trim().is_empty()).collect() }
    }

    fn column(&self, title: &'static str) -> Result<Column, TraceError> {
        let position = *self.columns.get(title).ok_or(TraceError::Column(title))?;
        Ok(Column { title, position })
    }

    fn rows(&self) -> impl Iterator<Item = Row<'a>> {
        self.body
            .iter()
            .map(|(line, text)| Row { line: *line, cells: text.split(',').map(str::trim).collect() })
    }
}

impl<'a> Row<'a> {
    fn text(&self, column: &Column) -> &'a str {
        self.cells.get(column.position).copied().unwrap_or("")
    }

    fn number<N: std::str::FromStr>(&self, column: &Column) -> Result<N, TraceError> {
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
    fn nodes_and_pods_of_every_kind() {
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
    fn errors_name_line_column_and_what_was_expected() {
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
    }
}
