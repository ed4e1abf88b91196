//! Grants and windows without a cluster, to try the library out:
//!
//! ```text
//! tessera-arbiter grant FOLDER UUID MEMORY-MIB CORES [CEILING [throughput]]   makes or changes the grant in FOLDER
//! tessera-arbiter run SECONDS UUID FOLDER...                                   hands out windows to these grants
//! ```
//!
//! `run` writes a line every second: milliseconds of the GPU that each grant has had so far.

mod nvml;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use tessera_arbiter::Service;
use tessera_arbiter::power::{self, PowerFactor, PowerModel};
use tessera_limits::limits::ShareMeaning;
use tessera_limits::{GpuLimit, GrantLimits, UuidBytes, files, futex};

const USAGE: &str = "usage: tessera-arbiter grant FOLDER UUID MEMORY-MIB CORES [CEILING [throughput]] | run SECONDS UUID FOLDER...";

/// How often what processes hold is measured though none waits for it.
const MEASURE: u64 = 5_000_000_000;

const SECOND: u64 = 1_000_000_000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments.as_slice() {
        ["grant", folder, uuid, memory, compute_percent] => {
            grant(folder, uuid, memory, compute_percent, compute_percent, "")
        }
        ["grant", folder, uuid, memory, compute_percent, compute_ceiling_percent] => {
            grant(folder, uuid, memory, compute_percent, compute_ceiling_percent, "")
        }
        ["grant", folder, uuid, memory, compute_percent, compute_ceiling_percent, meaning] => {
            grant(folder, uuid, memory, compute_percent, compute_ceiling_percent, meaning)
        }
        ["run", seconds, uuid, folders @ ..] => run(seconds, uuid, folders),
        _ => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn grant(
    folder: &str,
    uuid: &str,
    memory: &str,
    compute_percent: &str,
    compute_ceiling_percent: &str,
    meaning: &str,
) -> Result<(), String> {
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text} is no number; {USAGE}"));
    let percent = |text: &str| {
        let percent = number(text)?;
        u32::try_from(percent)
            .ok()
            .filter(|&percent| percent <= 100)
            .ok_or_else(|| format!("{percent} is over 100"))
    };
    let gpu = GpuLimit {
        uuid: UuidBytes::parse(uuid).ok_or_else(|| format!("{uuid} is no UUID of a GPU"))?,
        memory_bytes: number(memory)?
            .checked_mul(1 << 20)
            .ok_or_else(|| format!("{memory} MiB are too many"))?,
        context_bytes: 0,
        compute_percent: percent(compute_percent)?,
        compute_ceiling_percent: percent(compute_ceiling_percent)?,
    };
    let meaning = if meaning == "throughput" { ShareMeaning::Throughput } else { ShareMeaning::Time };
    let limits = GrantLimits { generation: 1, meaning, gpus: vec![gpu] };
    files::update_grant(Path::new(folder), &limits).map_err(|error| format!("{folder}: {error}"))?;
    Ok(())
}

fn run(seconds: &str, uuid: &str, folders: &[&str]) -> Result<(), String> {
    let seconds: u64 = seconds.parse().map_err(|_| format!("{seconds} is no number; {USAGE}"))?;
    let bytes = UuidBytes::parse(uuid).ok_or_else(|| format!("{uuid} is no UUID of a GPU"))?;
    let mut service = Service::default();
    for folder in folders {
        service.add(Path::new(folder)).map_err(|error| format!("{folder}: {error}"))?;
    }
    let gpu = nvml::NvmlGpu::find(uuid);
    let model = gpu.as_ref().and_then(nvml::NvmlGpu::limit).map(PowerModel::with_limit);
    let mut power = model.map(PowerFactor::new);
    let begin = futex::now();
    let (end, mut measured, mut read, mut told) = (begin + seconds * SECOND, 0, 0, begin);
    while futex::now() < end {
        let now = futex::now();
        let next = service.step(now);
        let is_due = now - measured >= MEASURE || service.awaiting_measurement().next().is_some();
        if let Some(gpu) = gpu.as_ref().filter(|_| is_due) {
            measured = now;
            measure(&mut service, gpu, bytes, folders, now);
        }
        if now - read >= power::SAMPLE_INTERVAL_NS
            && let (Some(factor), Some(gpu)) = (&mut power, &gpu)
            && let (Some(watts), Some(arbiter)) = (gpu.power(), service.gpu_mut(bytes))
        {
            read = now;
            arbiter.set_factor(factor.sample(now, watts, arbiter.busy()));
        }
        if now - told >= SECOND {
            told += SECOND;
            let used =
                folders.iter().map(|folder| service.usage(Path::new(folder), bytes).time_ns / 1_000_000);
            say(&used.map(|milliseconds| milliseconds.to_string()).collect::<Vec<_>>().join(" "))?;
        }
        service.wait(next);
    }
    Ok(())
}

/// Tells each grant what its processes hold by NVML.
fn measure(service: &mut Service, gpu: &nvml::NvmlGpu, uuid: UuidBytes, folders: &[&str], now: u64) {
    let folders = folders.iter().map(Path::new);
    let before: Vec<_> = folders.filter_map(|folder| Some((folder, service.held(folder, uuid)?))).collect();
    let holders = gpu.processes();
    for (folder, before) in before {
        let Some(demands) = service.demands(folder) else { continue };
        let ours: Vec<u32> = demands.processes().collect();
        let held = holders.iter().filter(|(process, _)| ours.contains(process)).map(|(_, bytes)| bytes);
        let held = held.sum();
        service.measured(folder, uuid, held, before, now);
    }
}

fn say(line: &str) -> Result<(), String> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| format!("stdout: {error}"))
}
