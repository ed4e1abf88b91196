//! Values on the command line of `place`: requests and GPUs in use.

use std::str::FromStr;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::Hold;
use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::units::{GpuIndex, MiB, Percent};
use tessera_wire::foreign::dialect::{MemoryUnit, gpushare, vcuda, whole};

/// Requests of a pod such as `whole:2+share:50c/7680m`, one per container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Requests(pub(crate) Vec<Request>);

/// GPUs in use, such as `0=50c/2048m,3=whole`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Used(pub(crate) Vec<(GpuIndex, Hold)>);

/// GPU indexes such as `0,3,5`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Indexes(pub(crate) Vec<GpuIndex>);

const REQUEST_FORMS: &str = "whole:2, share:50c/7680m, share:2x50c/7680m, memory:8192m, vcuda:50/30, vcuda:200, \
                             gpushare:8GiB, nvidia:1 or gputopology:4";
const USED_FORMS: &str = "0=50c/2048m, 0=50c, 0=2048m or 0=whole";

impl FromStr for Requests {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let requests = text.split('+').map(|part| request(part.trim()));
        Ok(Self(requests.collect::<Result<_>>()?))
    }
}

fn request(text: &str) -> Result<Request> {
    let (form, amount) = text.split_once(':').with_context(|| format!("`{text}`: write {REQUEST_FORMS}"))?;
    let asked = match form {
        "whole" => {
            let count = number(amount)?;
            let most = GpuSet::CAPACITY;
            let asked = whole::NVIDIA.request(count);
            asked.ok().with_context(|| format!("`{text}`: a node has at most {most} GPUs"))?
        }
        "nvidia" => whole::NVIDIA.request(number(amount)?)?,
        "gputopology" => whole::GPUTOPOLOGY.request(number(amount)?)?,
        "share" => {
            let (count, amount) =
                counted(amount).with_context(|| format!("`{text}`: write share:2x50c/7680m for 2 GPUs"))?;
            let (compute_percent, memory) =
                share(amount).with_context(|| format!("`{text}`: write share:50c/7680m"))?;
            ensure!(
                (1..100).contains(&compute_percent.0),
                "`{text}`: a share is 1 to 99 percent; write whole:1 for a whole GPU"
            );
            ensure!(
                memory > MiB::ZERO,
                "`{text}`: a share needs memory; write share:{}c/7680m",
                compute_percent.0
            );
            Some(Request::Share(Share { count, compute_percent, memory: MemoryRequest::Amount(memory) }))
        }
        "memory" => {
            let units = mebibytes(amount).with_context(|| format!("`{text}`: write memory:8192m"))?;
            gpushare::request(units.0, MemoryUnit::MiB)
        }
        "vcuda" => {
            let (core, memory) = amount.split_once('/').unwrap_or((amount, "0"));
            vcuda::request(number(core)?, number(memory)?)?
        }
        "gpushare" => {
            let digits = amount.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = &amount[digits.len()..];
            let unit = if unit.is_empty() { MemoryUnit::default() } else { unit.parse()? };
            gpushare::request(number(digits)?, unit)
        }
        _ => bail!("unknown form `{form}`; write {REQUEST_FORMS}"),
    };
    asked.ok_or_else(|| anyhow!("`{text}` requests nothing; write {REQUEST_FORMS}"))
}

impl FromStr for Used {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let entries = text.split(',').filter(|entry| !entry.trim().is_empty());
        Ok(Self(entries.map(|entry| held(entry.trim())).collect::<Result<_>>()?))
    }
}

fn held(entry: &str) -> Result<(GpuIndex, Hold)> {
    let wrong = || format!("`{entry}`: write {USED_FORMS}");
    let (gpu, amount) = entry.split_once('=').with_context(wrong)?;
    let gpu = GpuIndex(gpu.parse().with_context(wrong)?);
    let hold = match amount {
        "whole" => Hold::Whole,
        _ => {
            let (compute_percent, memory) = share(amount).with_context(wrong)?;
            Hold::Share { compute_percent, memory }
        }
    };
    Ok((gpu, hold))
}

impl FromStr for Indexes {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let indexes = text.split(',').map(|index| index.trim().parse().map(GpuIndex));
        Ok(Self(
            indexes
                .collect::<Result<_, _>>()
                .with_context(|| format!("`{text}`: write indexes such as 0,3"))?,
        ))
    }
}

/// Splits the number of GPUs off a share such as `2x50c/7680m`. Without one it is a share of one GPU.
fn counted(text: &str) -> Option<(u8, &str)> {
    let Some((count, share)) = text.split_once('x') else { return Some((1, text)) };
    let count =
        count.parse::<u8>().ok().filter(|count| (1..=GpuSet::CAPACITY).contains(&usize::from(*count)))?;
    Some((count, share))
}

/// Parses a share such as `50c/7680m`, `50c` or `7680m`.
fn share(text: &str) -> Result<(Percent, MiB)> {
    let mut amounts = (Percent::ZERO, MiB::ZERO);
    for part in text.split('/') {
        match part.strip_suffix('c') {
            Some(compute_percent) => amounts.0 = Percent(compute_percent.parse()?),
            None => amounts.1 = mebibytes(part)?,
        }
    }
    Ok(amounts)
}

fn mebibytes(text: &str) -> Result<MiB> {
    let digits = text.strip_suffix('m').with_context(|| format!("`{text}` has no unit"))?;
    Ok(MiB(number(digits)?))
}

fn number(text: &str) -> Result<u64> {
    text.trim().parse().with_context(|| format!("`{text}` is not a whole number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[Request]) {
        assert_eq!(text.parse::<Requests>().unwrap().0, expected, "{text}");
    }

    fn check_error(text: &str, part: &str) {
        let error = format!("{:#}", text.parse::<Requests>().unwrap_err());
        assert!(error.contains(part), "{text}: {error}");
    }

    #[test]
    fn parses_every_form_of_request() {
        let share = |percent, memory| Request::share(Percent(percent), MiB(memory));
        check("whole:2", &[Request::Whole(2)]);
        check("share:50c/7680m", &[share(50, 7680)]);
        let memory = MemoryRequest::Amount(MiB(3000));
        check(
            "share:2x30c/3000m",
            &[Request::Share(Share { count: 2, compute_percent: Percent(30), memory })],
        );
        check("memory:8192m", &[Request::memory(MiB(8192))]);
        check("vcuda:50/30", &[share(50, 7680)]);
        check("vcuda:200", &[Request::Whole(2)]);
        check("gpushare:8GiB", &[Request::memory(MiB(8192))]);
        check("gpushare:8", &[Request::memory(MiB(8192))]);
        check("gpushare:800MiB", &[Request::memory(MiB(800))]);
        check("nvidia:1", &[Request::Whole(1)]);
        check("gputopology:4", &[Request::Whole(4)]);
        check("nvidia:1 + vcuda:10/1", &[Request::Whole(1), share(10, 256)]);
    }

    #[test]
    fn every_error_says_what_to_write() {
        check_error("2", "write whole:2, share:50c/7680m");
        check_error("some:2", "unknown form `some`; write whole:2");
        check_error("whole:0", "`whole:0` requests nothing");
        check_error("whole:two", "`two` is not a whole number");
        check_error("share:50c", "a share needs memory; write share:50c/7680m");
        check_error("whole:99", "`whole:99`: a node has at most 64 GPUs");
        check_error("share:150c/1m", "a share is 1 to 99 percent; write whole:1");
        check_error("share:50", "write share:50c/7680m");
        check_error("share:2x50c", "a share needs memory");
        for wrong in ["share:0x50c/1m", "share:65x50c/1m", "share:300x50c/1m", "share:x50c/1m"] {
            check_error(wrong, "write share:2x50c/7680m");
        }
        check_error("memory:8", "write memory:8192m: `8` has no unit");
        check_error("vcuda:150/3", "write 100 or 200 for whole GPUs");
        check_error("vcuda:50", "add tencent.com/vcuda-memory");
        check_error("gpushare:8GB", "write GiB or MiB");
        check_error("gpushare:", "not a whole number");
        check_error("nvidia:65", "write at most 64");
    }

    #[test]
    fn parses_gpus_in_use() {
        let part = |compute_percent, memory| Hold::Share {
            compute_percent: Percent(compute_percent),
            memory: MiB(memory),
        };
        let used: Used = "0=50c/2048m, 3=whole,1=20c,2=100m".parse().unwrap();
        let expected = [(0, part(50, 2048)), (3, Hold::Whole), (1, part(20, 0)), (2, part(0, 100))];
        assert_eq!(used.0, expected.map(|(gpu, hold)| (GpuIndex(gpu), hold)));
        for wrong in ["0", "x=whole", "0=all", "0=50", "300=whole"] {
            let error = format!("{:#}", wrong.parse::<Used>().unwrap_err());
            assert!(error.contains("write 0=50c/2048m"), "{wrong}: {error}");
        }
    }
}
