//! The vocabularies pods ask in, all read into one [`Request`].

pub mod gpushare;
pub mod vcuda;
pub mod whole;

use std::fmt;

use tessera_core::request::Request;

use crate::foreign::objects::Amounts;
use crate::foreign::quantity::Quantity;

pub use gpushare::MemoryUnit;

/// A vocabulary.
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
}

/// A request nobody can serve. Each message says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// Not a number at all.
    #[error("{resource}: {value} is no number; write {example}")]
    NotANumber {
        /// Which resource.
        resource: &'static str,
        /// What the manifest says.
        value: String,
        /// What it could say.
        example: &'static str,
    },
    /// A part of a GPU asked for in a vocabulary of whole ones, or less than nothing.
    #[error("{resource}: {value} is not a whole number; write {example}")]
    NotWhole {
        /// Which resource.
        resource: &'static str,
        /// What the manifest says.
        value: String,
        /// What it could say.
        example: &'static str,
    },
    /// A suffix on a resource that already has a unit.
    #[error(
        "{resource}: {value} means {meant} units of {unit}; write the number of units, such as {example}"
    )]
    Suffix {
        /// Which resource.
        resource: &'static str,
        /// What the manifest says.
        value: String,
        /// The number Kubernetes reads.
        meant: u64,
        /// One unit of the resource.
        unit: &'static str,
        /// The same number without its suffix.
        example: String,
    },
    /// More GPUs than any node has.
    #[error("{resource}: {value} is more GPUs than a node can have; write at most {most}")]
    TooMany {
        /// Which resource.
        resource: &'static str,
        /// What was asked for.
        value: u64,
        /// The limit, in the resource's unit.
        most: u64,
    },
    /// More than one GPU, but not a whole number of GPUs.
    #[error(
        "{core}: {0} is more than one GPU but no multiple of 100; write {lower} or {upper} for whole GPUs, or at most 99 for a share of one",
        core = vcuda::CORE, lower = .0 / 100 * 100, upper = .0.saturating_add(100) / 100 * 100
    )]
    CoresBetweenGpus(u64),
    /// A share of compute without memory.
    #[error(
        "{core}: {0} is a share of a GPU and needs memory; add {memory}, in units of 256 MiB (such as 30 for 7680 MiB), or write {core}: 100 for a whole GPU",
        core = vcuda::CORE, memory = vcuda::MEMORY
    )]
    ShareWithoutMemory(u64),
    /// Memory without a share of compute.
    #[error("{memory}: {0} needs {core} too; add {core}: 1 to 99 for a share, or 100 for a whole GPU", core = vcuda::CORE, memory = vcuda::MEMORY)]
    MemoryWithoutShare(u64),
    /// A resource that only informs.
    #[error(
        "{} only tells how many GPUs a node has; ask for memory with {}",
        gpushare::COUNT,
        gpushare::MEMORY
    )]
    Informational,
    /// Two vocabularies in one container.
    #[error("asks in two vocabularies, {0} and {1}; keep one of them")]
    Mixed(Dialect, Dialect),
    /// Requests and limits differ.
    #[error(
        "{resource}: requests {requests} but limits to {limits}; write the same number in both, or limits only"
    )]
    Unequal {
        /// Which resource.
        resource: &'static str,
        /// In `requests`.
        requests: String,
        /// In `limits`.
        limits: String,
    },
}

/// What a container asks of the GPUs, in whichever vocabulary; `None` if it asks for none. The unit of
/// `aliyun.com/gpu-mem` is the node's, so the same pod may mean different amounts on different nodes.
pub fn request(
    limits: &Amounts,
    requests: &Amounts,
    unit: MemoryUnit,
) -> Result<Option<(Dialect, Request)>, BadRequest> {
    let asked = Asked { limits, requests };
    if asked.text(gpushare::COUNT)?.is_some_and(|text| text.parse() != Ok(Quantity::default())) {
        return Err(BadRequest::Informational);
    }
    let requests = [
        (Dialect::Nvidia, whole::NVIDIA.read(&asked)?),
        (Dialect::Gputopology, whole::GPUTOPOLOGY.read(&asked)?),
        (Dialect::Gpushare, gpushare::read(&asked, unit)?),
        (Dialect::Vcuda, vcuda::read(&asked)?),
    ];
    let mut found = requests.into_iter().filter_map(|(dialect, request)| Some((dialect, request?)));
    match (found.next(), found.next()) {
        (Some((first, _)), Some((second, _))) => Err(BadRequest::Mixed(first, second)),
        (only, _) => Ok(only),
    }
}

/// More units than any GPU will ever have, even of 1 MiB: ten terabytes.
const VAST: u64 = 10_000_000;

/// What a manifest says of each resource, in `limits` or, failing that, in `requests`.
pub(crate) struct Asked<'a> {
    limits: &'a Amounts,
    requests: &'a Amounts,
}

impl<'a> Asked<'a> {
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

    /// A whole number; zero where the manifest does not say.
    fn count(&self, resource: &'static str, example: &'static str) -> Result<u64, BadRequest> {
        let Some(text) = self.text(resource)? else {
            return Ok(0);
        };
        let value = || text.to_owned();
        let quantity: Quantity =
            text.parse().map_err(|_| BadRequest::NotANumber { resource, value: value(), example })?;
        quantity.whole().ok_or_else(|| BadRequest::NotWhole { resource, value: value(), example })
    }

    /// A number of units, refusing suffixes that cannot be meant: `10G` would mean ten thousand million units. The API
    /// server itself writes 8000 as `8k`, so a suffix alone proves nothing.
    fn units(
        &self,
        resource: &'static str,
        example: &'static str,
        unit: &'static str,
    ) -> Result<u64, BadRequest> {
        let meant = self.count(resource, example)?;
        let text = self.text(resource)?.unwrap_or_default().trim();
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        if digits.len() < text.len() && meant > VAST {
            let example = digits.to_owned();
            return Err(BadRequest::Suffix { resource, value: text.to_owned(), meant, unit, example });
        }
        Ok(meant)
    }
}

impl Dialect {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Nvidia, Self::Gputopology, Self::Gpushare, Self::Vcuda];

    /// The resource by which pods ask in it, and nodes offer.
    #[must_use]
    pub fn resource(self) -> &'static str {
        match self {
            Self::Nvidia => whole::NVIDIA.resource,
            Self::Gputopology => whole::GPUTOPOLOGY.resource,
            Self::Gpushare => gpushare::MEMORY,
            Self::Vcuda => vcuda::CORE,
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
    /// The set with `dialect`.
    #[must_use]
    pub fn with(self, dialect: Dialect) -> Self {
        Self(self.0 | Self::bit(dialect))
    }

    /// Whether every member of `other` is a member.
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
        }
    }
}

#[cfg(test)]
mod tests;
