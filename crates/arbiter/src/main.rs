//! Creates grants and assigns windows without a cluster, to try out the library:
//!
//! ```text
//! tessera-arbiter grant DIRECTORY UUID MEMORY-MIB COMPUTE-PERCENT [CEILING-PERCENT [throughput]]
//!     creates or changes the grant in DIRECTORY
//! tessera-arbiter run SECONDS UUID DIRECTORY...
//!     assigns windows to these grants
//! ```
//!
//! `run` prints a line every second: the milliseconds of the GPU that each grant has used so far.

mod nvml;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tessera_arbiter::Service;
use tessera_arbiter::power::{self, PowerFactor, PowerModel};
use tessera_limits::limits::ShareMeaning;
use tessera_limits::process_stat::ProcessStat;
use tessera_limits::{Bytes, GpuLimit, GrantLimits, UuidBytes, files, futex};
use thiserror::Error;

const USAGE: &str = "usage: tessera-arbiter grant DIRECTORY UUID MEMORY-MIB COMPUTE-PERCENT \
    [CEILING-PERCENT [throughput]] | run SECONDS UUID DIRECTORY...";

/// Longest interval in nanoseconds between two measurements of device memory. A waiting process
/// triggers a measurement at once.
const MEASUREMENT_INTERVAL_NS: u64 = 5_000_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// The reason why a command failed.
#[derive(Debug, Error)]
enum CommandError {
    #[error("{USAGE}")]
    Usage,
    #[error("{0} is not a number; {USAGE}")]
    NotANumber(String),
    #[error("{0} is not a percentage between 0 and 100; {USAGE}")]
    NotAPercentage(String),
    #[error("{0} MiB are more than a 64-bit number of bytes; give a smaller limit")]
    TooMuchMemory(String),
    #[error("{0} is not the UUID of a GPU; `nvidia-smi -L` lists the UUIDs")]
    NotAUuid(String),
    #[error("cannot use the grant in {}: {source}", directory.display())]
    Grant { directory: PathBuf, source: io::Error },
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["grant", directory, uuid, memory, compute] => {
            grant(directory, uuid, memory, compute, compute, ShareMeaning::Time)
        }
        ["grant", directory, uuid, memory, compute, ceiling] => {
            grant(directory, uuid, memory, compute, ceiling, ShareMeaning::Time)
        }
        ["grant", directory, uuid, memory, compute, ceiling, meaning] => {
            let by_throughput = *meaning == "throughput";
            let meaning = if by_throughput { ShareMeaning::Throughput } else { ShareMeaning::Time };
            grant(directory, uuid, memory, compute, ceiling, meaning)
        }
        ["run", seconds, uuid, directories @ ..] => run(seconds, uuid, directories),
        _ => Err(CommandError::Usage),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn grant(
    directory: &str,
    uuid: &str,
    memory_mib: &str,
    compute_percent: &str,
    compute_ceiling_percent: &str,
    meaning: ShareMeaning,
) -> Result<(), CommandError> {
    let gpu = GpuLimit {
        uuid: parse_uuid(uuid)?,
        memory: parse_number(memory_mib)?
            .checked_mul(1 << 20)
            .map(Bytes)
            .ok_or_else(|| CommandError::TooMuchMemory(memory_mib.to_owned()))?,
        context: Bytes::ZERO,
        compute_percent: parse_percentage(compute_percent)?,
        compute_ceiling_percent: parse_percentage(compute_ceiling_percent)?,
    };
    let directory = Path::new(directory);
    files::update_grant(directory, &GrantLimits { generation: 1, meaning, gpus: vec![gpu] })
        .map_err(|source| CommandError::Grant { directory: directory.to_owned(), source })?;
    Ok(())
}

fn run(seconds: &str, uuid: &str, directories: &[&str]) -> Result<(), CommandError> {
    let seconds = parse_number(seconds)?;
    let gpu_uuid = parse_uuid(uuid)?;
    let mut service = Service::default();
    for directory in directories.iter().map(Path::new) {
        service
            .add(directory)
            .map_err(|source| CommandError::Grant { directory: directory.to_owned(), source })?;
    }
    let gpu = nvml::NvmlGpu::find(uuid);
    let model = gpu.as_ref().and_then(nvml::NvmlGpu::power_limit_watts).map(PowerModel::with_limit);
    let mut power = model.map(PowerFactor::new);
    let begin = futex::now();
    let (end, mut measured_at, mut sampled_at, mut printed_at) = (begin + seconds * SECOND_NS, 0, 0, begin);
    while futex::now() < end {
        let now = futex::now();
        let next = service.step(now);
        let is_due =
            now - measured_at >= MEASUREMENT_INTERVAL_NS || service.awaiting_measurement().next().is_some();
        if let Some(gpu) = gpu.as_ref().filter(|_| is_due) {
            measured_at = now;
            measure(&mut service, gpu, gpu_uuid, directories, now);
        }
        if now - sampled_at >= power::SAMPLE_INTERVAL_NS
            && let (Some(factor), Some(gpu)) = (&mut power, &gpu)
            && let (Some(watts), Some(arbiter)) = (gpu.average_power_watts(), service.gpu_mut(gpu_uuid))
        {
            sampled_at = now;
            arbiter.set_factor(factor.sample(now, watts, arbiter.busy()));
        }
        if now - printed_at >= SECOND_NS {
            printed_at += SECOND_NS;
            let stopped: Vec<PathBuf> = directories
                .iter()
                .map(PathBuf::from)
                .filter(|directory| {
                    service.account(directory).is_some_and(|account| is_stopped(account.live_processes()))
                })
                .collect();
            service.set_stopped(|directory| stopped.iter().any(|stopped| stopped == directory));
            let used_ms = directories.iter().map(|directory| {
                let usage = service.usage(Path::new(directory), gpu_uuid);
                (usage.busy_ns / 1_000_000).to_string()
            });
            print_line(&used_ms.collect::<Vec<_>>().join(" "))?;
        }
        service.wait(next);
    }
    Ok(())
}

/// Returns whether there are processes and all of them are stopped.
fn is_stopped(processes: impl Iterator<Item = u32>) -> bool {
    let mut states = processes.map(|process| {
        let stat = std::fs::read(format!("/proc/{process}/stat")).ok();
        stat.and_then(|stat| ProcessStat::parse(&stat)).is_some_and(|stat| stat.is_stopped)
    });
    states.next().is_some_and(|first| first && states.all(|is_stopped| is_stopped))
}

/// Reports to each grant how much memory its processes hold according to NVML.
fn measure(service: &mut Service, gpu: &nvml::NvmlGpu, uuid: UuidBytes, directories: &[&str], now: u64) {
    let directories = directories.iter().map(Path::new);
    let charged: Vec<_> =
        directories.filter_map(|directory| Some((directory, service.held(directory, uuid)?))).collect();
    let processes = gpu.processes();
    for (directory, charged) in charged {
        let Some(account) = service.account(directory) else { continue };
        let own: Vec<u32> = account.live_processes().collect();
        let held =
            processes.iter().filter(|(process, _)| own.contains(process)).map(|(_, bytes)| *bytes).sum();
        service.record_measurement(directory, uuid, held, charged, now);
    }
}

fn parse_number(text: &str) -> Result<u64, CommandError> {
    text.parse().map_err(|_| CommandError::NotANumber(text.to_owned()))
}

fn parse_percentage(text: &str) -> Result<u32, CommandError> {
    u32::try_from(parse_number(text)?)
        .ok()
        .filter(|&percent| percent <= 100)
        .ok_or_else(|| CommandError::NotAPercentage(text.to_owned()))
}

fn parse_uuid(text: &str) -> Result<UuidBytes, CommandError> {
    UuidBytes::parse(text).ok_or_else(|| CommandError::NotAUuid(text.to_owned()))
}

fn print_line(line: &str) -> Result<(), CommandError> {
    writeln!(io::stdout(), "{line}").map_err(CommandError::Output)
}
