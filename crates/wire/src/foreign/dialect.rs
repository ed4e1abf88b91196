//! The dialects of GPU requests. Each dialect is parsed into the same [`Request`].

pub mod gpushare;
pub mod hami;
pub mod vcuda;
pub mod whole;

use std::fmt;

use tessera_core::request::Request;

use crate::foreign::objects::Amounts;
use crate::foreign::quantity::Quantity;

pub use gpushare::MemoryUnit;

/// A vocabulary of GPU requests: the resource names of one project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dialect {
    /// `nvidia.com/gpu`: whole GPUs.
    Nvidia,
    /// `aliyun.com/gpu`: whole GPUs.
    Gputopology,
    /// `aliyun.com/gpu-mem`: memory of one GPU.
    Gpushare,
    /// `tencent.com/vcuda-core` and `tencent.com/vcuda-memory`: a share of one GPU, or whole ones.
    Vcuda,
    /// `nvidia.com/gpu` with `nvidia.com/gpumem` and `nvidia.com/gpucores`: a share of each of several GPUs.
    Hami,
}

/// A request that no node can serve. Each message says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// The amount is not a number.
    #[error("{resource}: {value} is not a number; write {example}")]
    NotANumber {
        /// Name of the resource.
        resource: &'static str,
        /// Amount in the manifest.
        value: String,
        /// Valid amount to write instead.
        example: &'static str,
    },
    /// The amount is a fraction or negative, but the dialect counts whole GPUs.
    #[error("{resource}: {value} is not a whole number; write {example}")]
    NotWhole {
        /// Name of the resource.
        resource: &'static str,
        /// Amount in the manifest.
        value: String,
        /// Valid amount to write instead.
        example: &'static str,
    },
    /// The amount has a suffix, but the resource already has a unit.
    #[error(
        "{resource}: {value} means {meant} units of {unit}; write the number of units, such as {example}"
    )]
    Suffix {
        /// Name of the resource.
        resource: &'static str,
        /// Amount in the manifest.
        value: String,
        /// Number that Kubernetes parses from the amount.
        meant: u64,
        /// Name of the resource's unit.
        unit: &'static str,
        /// Amount without its suffix.
        example: String,
    },
    /// The container requests more GPUs than any node can have.
    #[error("{resource}: {value} is more GPUs than a node can have; write at most {max}")]
    TooMany {
        /// Name of the resource.
        resource: &'static str,
        /// Requested amount.
        value: u64,
        /// Largest valid amount, in the resource's unit.
        max: u64,
    },
    /// The container requests more than one GPU, but not a whole number of GPUs.
    #[error(
        "{core}: {0} is more than one GPU but not a multiple of 100; write {lower} or {upper} for whole GPUs, or at most 99 for a share of one",
        core = vcuda::CORE, lower = .0 / 100 * 100, upper = .0.saturating_add(100) / 100 * 100
    )]
    CoresBetweenGpus(u64),
    /// The container requests a share of compute time without memory.
    #[error(
        "{core}: {0} is a share of a GPU and needs memory; add {memory}, in units of 256 MiB (such as 30 for 7680 MiB), or write {core}: 100 for a whole GPU",
        core = vcuda::CORE, memory = vcuda::MEMORY
    )]
    ShareWithoutMemory(u64),
    /// The container requests memory without a share of compute time.
    #[error("{memory}: {0} needs {core} too; add {core}: 1 to 99 for a share, or 100 for a whole GPU", core = vcuda::CORE, memory = vcuda::MEMORY)]
    MemoryWithoutShare(u64),
    /// The container requests a resource that only reports the number of GPUs.
    #[error(
        "{} only reports how many GPUs a node has; request memory with {}",
        gpushare::COUNT,
        gpushare::MEMORY
    )]
    Informational,
    /// The amount is larger than the resource allows.
    #[error("{resource}: {value} is out of range; write at most {max}")]
    OutOfRange {
        /// Name of the resource.
        resource: &'static str,
        /// Requested amount.
        value: u64,
        /// Largest valid amount.
        max: u64,
    },
    /// The container requests memory both as an amount and as a part of the GPU.
    #[error("requests both {} and {}; keep one of them", hami::MEMORY, hami::MEMORY_PERCENT)]
    MemoryTwice,
    /// The container requests a part of each of zero GPUs.
    #[error(
        "requests a part of each GPU but no GPU; add {}: 1, or remove {}, {} and {}",
        hami::COUNT,
        hami::MEMORY,
        hami::MEMORY_PERCENT,
        hami::CORES
    )]
    PartOfNoGpu,
    /// One container uses two dialects.
    #[error("requests both {0} and {1}; keep one of them")]
    Mixed(Dialect, Dialect),
    /// The amounts in `requests` and `limits` differ.
    #[error(
        "{resource}: requests {requests} but limits to {limits}; write the same number in both, or limits only"
    )]
    Unequal {
        /// Name of the resource.
        resource: &'static str,
        /// Amount in `requests`.
        requests: String,
        /// Amount in `limits`.
        limits: String,
    },
}

/// Returns the GPU request of a container and its dialect, or `None` if it requests no GPU.
///
/// The node defines the unit of `aliyun.com/gpu-mem`, so one pod may request different amounts on
/// different nodes.
pub fn request(
    limits: &Amounts,
    requests: &Amounts,
    unit: MemoryUnit,
) -> Result<Option<(Dialect, Request)>, BadRequest> {
    let amounts = RequestedAmounts { limits, requests };
    if amounts.text(gpushare::COUNT)?.is_some_and(|text| text.parse() != Ok(Quantity::default())) {
        return Err(BadRequest::Informational);
    }
    let hami = hami::parse(&amounts)?;
    // The number of GPUs is part of HAMi's request.
    let whole = if hami.is_some() { None } else { whole::NVIDIA.parse(&amounts)? };
    let requests = [
        (Dialect::Nvidia, whole),
        (Dialect::Hami, hami),
        (Dialect::Gputopology, whole::GPUTOPOLOGY.parse(&amounts)?),
        (Dialect::Gpushare, gpushare::parse(&amounts, unit)?),
        (Dialect::Vcuda, vcuda::parse(&amounts)?),
    ];
    let mut found = requests.into_iter().filter_map(|(dialect, request)| Some((dialect, request?)));
    match (found.next(), found.next()) {
        (Some((first, _)), Some((second, _))) => Err(BadRequest::Mixed(first, second)),
        (only, _) => Ok(only),
    }
}

/// Largest plausible number of memory units of one GPU. In units of 1 MiB it is ten terabytes,
/// more than any GPU has.
const MAX_PLAUSIBLE_UNITS: u64 = 10_000_000;

/// The amounts of a container in its manifest. `limits` wins over `requests`.
pub(crate) struct RequestedAmounts<'a> {
    limits: &'a Amounts,
    requests: &'a Amounts,
}

impl<'a> RequestedAmounts<'a> {
    fn text(&self, resource: &'static str) -> Result<Option<&'a str>, BadRequest> {
        let (limit, request) = (self.limits.get(resource), self.requests.get(resource));
        if let (Some(limits), Some(requests)) = (limit, request)
            && limits.0.parse::<Quantity>() != requests.0.parse::<Quantity>()
        {
            let (requests, limits) = (requests.0.clone(), limits.0.clone());
            return Err(BadRequest::Unequal { resource, requests, limits });
        }
        Ok(limit.or(request).map(|amount| amount.0.as_str()))
    }

    /// Returns a whole number, or zero if the manifest does not name the resource.
    fn count(&self, resource: &'static str, example: &'static str) -> Result<u64, BadRequest> {
        let Some(text) = self.text(resource)? else {
            return Ok(0);
        };
        let value = || text.to_owned();
        let quantity: Quantity =
            text.parse().map_err(|_| BadRequest::NotANumber { resource, value: value(), example })?;
        quantity.whole().ok_or_else(|| BadRequest::NotWhole { resource, value: value(), example })
    }

    /// Returns a number of units and rejects implausible suffixes: `10G` would be ten billion
    /// units. Smaller amounts with a suffix are valid, because the API server writes 8000 as `8k`.
    fn units(
        &self,
        resource: &'static str,
        example: &'static str,
        unit: &'static str,
    ) -> Result<u64, BadRequest> {
        let meant = self.count(resource, example)?;
        let text = self.text(resource)?.unwrap_or_default().trim();
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        if digits.len() < text.len() && meant > MAX_PLAUSIBLE_UNITS {
            let example = digits.to_owned();
            return Err(BadRequest::Suffix { resource, value: text.to_owned(), meant, unit, example });
        }
        Ok(meant)
    }
}

impl Dialect {
    /// All dialects.
    pub const ALL: [Self; 5] = [Self::Nvidia, Self::Gputopology, Self::Gpushare, Self::Vcuda, Self::Hami];

    /// All resources of all dialects that pods request. An extender's configuration lists them as
    /// `managedResources`.
    pub const RESOURCES: [&'static str; 9] = [
        whole::NVIDIA.resource,
        whole::GPUTOPOLOGY.resource,
        gpushare::MEMORY,
        vcuda::CORE,
        vcuda::MEMORY,
        hami::MEMORY,
        hami::MEMORY_PERCENT,
        hami::CORES,
        hami::PRIORITY,
    ];

    /// Returns the resource that tells this dialect apart. Nodes advertise it, except that of HAMi.
    #[must_use]
    pub fn resource(self) -> &'static str {
        match self {
            Self::Nvidia => whole::NVIDIA.resource,
            Self::Gputopology => whole::GPUTOPOLOGY.resource,
            Self::Gpushare => gpushare::MEMORY,
            Self::Vcuda => vcuda::CORE,
            Self::Hami => hami::MEMORY,
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

/// A set of dialects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DialectSet(u8);

impl DialectSet {
    /// Returns the set with `dialect` added.
    #[must_use]
    pub fn with(self, dialect: Dialect) -> Self {
        Self(self.0 | Self::bit(dialect))
    }

    /// Returns the dialects of both sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether this set contains every dialect of `other`.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    fn bit(dialect: Dialect) -> u8 {
        1 << match dialect {
            Dialect::Nvidia => 0,
            Dialect::Gputopology => 1,
            Dialect::Gpushare => 2,
            Dialect::Vcuda => 3,
            Dialect::Hami => 4,
        }
    }
}

#[cfg(test)]
mod tests;
