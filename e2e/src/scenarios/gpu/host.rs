//! What the driver of this host says, and the Python with PyTorch that containers use.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};

/// The only GPU of this host, and its Python.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub(super) uuid: String,
    pub(super) model: String,
    pub(super) memory_mib: u64,
    pub(super) python: Python,
}

/// A Python that has PyTorch.
#[derive(Debug, Clone)]
pub(super) struct Python {
    pub(super) program: PathBuf,
    /// Directories that containers need in addition to `/usr`.
    pub(super) directories: Vec<PathBuf>,
}

impl Host {
    pub(super) fn find() -> Result<Self> {
        let answer = ask_gpu("uuid,name,memory.total,driver_version")?;
        let gpus: Vec<&str> = answer.lines().collect();
        ensure!(gpus.len() == 1, "these scenarios need a host with one GPU, and this one has {}", gpus.len());
        let words: Vec<&str> = gpus[0].split(", ").collect();
        let [uuid, model, memory_mib, _driver] = words.as_slice() else {
            anyhow::bail!("nvidia-smi answers {answer:?}");
        };
        Ok(Self {
            uuid: (*uuid).to_owned(),
            model: (*model).to_owned(),
            memory_mib: memory_mib.parse().context("the memory of the GPU")?,
            python: Python::find()?,
        })
    }

    /// Returns the memory in use on the GPU by the driver's count.
    pub(super) fn used_mib(&self) -> Result<u64> {
        ask_gpu("memory.used")?.trim().parse().context("the used memory of the GPU")
    }

    /// Returns processes on the GPU with their memory in MiB, by the driver's count.
    pub(super) fn processes(&self) -> Result<Vec<(u32, u64)>> {
        let text = output(
            Command::new("nvidia-smi")
                .args(["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]),
        )?;
        let process = |line: &str| -> Result<(u32, u64)> {
            let (pid, memory_mib) = line.split_once(", ").context("no comma")?;
            Ok((pid.parse()?, memory_mib.parse()?))
        };
        text.lines().map(|line| process(line).with_context(|| format!("nvidia-smi says {line:?}"))).collect()
    }
}

impl Python {
    fn find() -> Result<Self> {
        let script = "import sys, torch; print(sys.executable, sys.prefix, sys.base_prefix, sep='\\n')";
        let text = output(Command::new("python3").args(["-c", script]))
            .context("containers need a python3 with PyTorch on the PATH of this host")?;
        let mut lines = text.lines().map(PathBuf::from);
        let program = lines.next().context("Python printed nothing")?;
        let directories = lines.filter(|path| !path.starts_with("/usr")).collect();
        Ok(Self { program, directories })
    }
}

/// Returns properties of the GPU, without headings and units.
pub(super) fn ask_gpu(properties: &str) -> Result<String> {
    output(
        Command::new("nvidia-smi")
            .arg(format!("--query-gpu={properties}"))
            .arg("--format=csv,noheader,nounits"),
    )
}

/// Runs a command and returns what it prints.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{command:?} failed: {text}{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(text)
}
