//! Grants and windows without a cluster, to try the library out:
//!
//! ```text
//! tessera-arbiter grant FOLDER UUID MEMORY-MIB CORES [CEILING]   makes or changes the grant in FOLDER
//! tessera-arbiter run SECONDS FOLDER...                          hands out windows to these grants
//! ```

use std::path::Path;
use std::process::ExitCode;

use tessera_arbiter::Service;
use tessera_arbiter::service::TICK;
use tessera_limits::{CardLimit, Limits, files, futex};

const USAGE: &str =
    "usage: tessera-arbiter grant FOLDER UUID MEMORY-MIB CORES [CEILING] | run SECONDS FOLDER...";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments.as_slice() {
        ["grant", folder, uuid, memory, cores] => grant(folder, uuid, memory, cores, cores),
        ["grant", folder, uuid, memory, cores, ceiling] => grant(folder, uuid, memory, cores, ceiling),
        ["run", seconds, folders @ ..] => run(seconds, folders),
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

fn grant(folder: &str, uuid: &str, memory: &str, cores: &str, ceiling: &str) -> Result<(), String> {
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text} is no number; {USAGE}"));
    let percent = |text: &str| {
        let percent = number(text)?;
        u32::try_from(percent)
            .ok()
            .filter(|&percent| percent <= 100)
            .ok_or_else(|| format!("{percent} is over 100"))
    };
    let card = CardLimit {
        uuid: uuid_bytes(uuid).ok_or_else(|| format!("{uuid} is no UUID of a card"))?,
        memory: number(memory)?.checked_mul(1 << 20).ok_or_else(|| format!("{memory} MiB are too many"))?,
        context: 0,
        cores: percent(cores)?,
        ceiling: percent(ceiling)?,
    };
    let limits = Limits { generation: 1, cards: vec![card], ..Limits::default() };
    files::grant(Path::new(folder), &limits).map_err(|error| format!("{folder}: {error}"))?;
    Ok(())
}

fn run(seconds: &str, folders: &[&str]) -> Result<(), String> {
    let seconds: u64 = seconds.parse().map_err(|_| format!("{seconds} is no number; {USAGE}"))?;
    let mut service = Service::default();
    for folder in folders {
        service.add(Path::new(folder)).map_err(|error| format!("{folder}: {error}"))?;
    }
    let end = futex::now() + seconds * 1_000_000_000;
    while futex::now() < end {
        service.step(futex::now());
        futex::sleep(TICK);
    }
    Ok(())
}

/// The bytes of "GPU-0123abcd-…", or of the digits alone.
fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim_start_matches("GPU-").chars().filter(|digit| *digit != '-').collect();
    u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32).map(u128::to_be_bytes)
}
