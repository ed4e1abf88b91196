//! gpu-admission's quota: the settings file, and the ConfigMap with the limits of each namespace.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tessera_core::quota::{Guarantee, NamespaceLimit, Quota, UnreadableLimits};
use tessera_core::units::MiB;

/// Key in the ConfigMap that holds the limits.
pub const DATA_KEY: &str = "gpu_quota";

/// The settings file, with gpu-admission's keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct QuotaSettings {
    /// Name of the ConfigMap.
    #[serde(rename = "QuotaConfigMapName", default = "default_name")]
    pub name: String,
    /// Namespace of the ConfigMap.
    #[serde(rename = "QuotaConfigMapNamespace", default = "default_namespace")]
    pub namespace: String,
    /// Node label that holds the GPU model.
    #[serde(rename = "GPUModelLabel")]
    pub model_label: String,
    /// Node label that holds the pool.
    #[serde(rename = "GPUPoolLabel")]
    pub pool_label: String,
}

/// Example of a namespace's limits, for error messages.
const EXPECTED: &str = r#"{"quota": {"<model>": 4}, "pool": ["<pool>"], "memoryMiB": 65536, "percent": 400, "guaranteed": {"percent": 200}}"#;

/// Limits that cannot be parsed at all.
#[derive(Debug, thiserror::Error)]
#[error("{origin} cannot be read: {source}; write {{\"<namespace>\": {EXPECTED}}}")]
pub struct BadQuota {
    origin: String,
    source: serde_json::Error,
}

/// A settings file that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("expected {{\"GPUModelLabel\": \"...\", \"GPUPoolLabel\": \"...\"}}: {0}")]
pub struct BadQuotaSettings(#[from] serde_json::Error);

/// The limits of one namespace. An unknown key is an error, because it may be a misspelt limit.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Namespace {
    quota: Option<BTreeMap<String, u64>>,
    pool: Option<Vec<String>>,
    /// Tessera's extension: memory of all GPUs together.
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<u64>,
    /// Tessera's extension: compute percent of all GPUs together.
    percent: Option<u64>,
    /// Tessera's extension: the part that the namespace gets back from others.
    guaranteed: Option<Guaranteed>,
}

/// The guaranteed part of a namespace.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Guaranteed {
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<u64>,
    percent: Option<u64>,
}

/// Limits of one namespace that cannot be followed.
#[derive(Debug, thiserror::Error)]
enum BadNamespace {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("guaranteed names no amount: write percent, memoryMiB or both")]
    Empty,
    #[error("guaranteed.{key} is {guaranteed}, more than the limit {key} of {limit}")]
    AboveLimit { key: &'static str, guaranteed: u64, limit: u64 },
}

impl Namespace {
    /// Checks that the guaranteed part names an amount and is within the limits.
    fn check(self) -> Result<Self, BadNamespace> {
        let Some(Guaranteed { memory_mib, percent }) = &self.guaranteed else { return Ok(self) };
        if memory_mib.is_none() && percent.is_none() {
            return Err(BadNamespace::Empty);
        }
        let pairs = [("percent", *percent, self.percent), ("memoryMiB", *memory_mib, self.memory_mib)];
        for (key, guaranteed, limit) in pairs {
            if let (Some(guaranteed), Some(limit)) = (guaranteed, limit)
                && guaranteed > limit
            {
                return Err(BadNamespace::AboveLimit { key, guaranteed, limit });
            }
        }
        Ok(self)
    }
}

/// Parses the settings file.
pub fn parse_settings(json: &str) -> Result<QuotaSettings, BadQuotaSettings> {
    Ok(serde_json::from_str(json)?)
}

impl QuotaSettings {
    /// Returns where the limits are stored, for error messages.
    #[must_use]
    pub fn origin(&self) -> String {
        format!("key {DATA_KEY} of ConfigMap {}/{}", self.namespace, self.name)
    }
}

/// Parses the limits of all namespaces. `origin` names their source in error messages.
///
/// Invalid limits of one namespace do not affect the others: [`Quota`] records the error for that
/// namespace.
pub fn parse(json: &str, origin: &str) -> Result<Quota, BadQuota> {
    let bad = |source| BadQuota { origin: origin.to_owned(), source };
    let written: BTreeMap<String, Value> = serde_json::from_str(json).map_err(bad)?;
    let (mut namespaces, mut unreadable) = (BTreeMap::new(), BTreeMap::new());
    for (name, limits) in written {
        match Namespace::deserialize(limits).map_err(BadNamespace::from).and_then(Namespace::check) {
            Ok(limits) => {
                namespaces.insert(name, limits.into());
            }
            Err(error) => {
                let why = format!(
                    "the limits of namespace {name} in {origin} cannot be read: {error}; write {EXPECTED}, or the keys of it that you want to limit"
                );
                unreadable.insert(name, why);
            }
        }
    }
    Ok(Quota { namespaces, unreadable: UnreadableLimits::Of(unreadable) })
}

impl From<Namespace> for NamespaceLimit {
    fn from(limits: Namespace) -> Self {
        Self {
            // A namespace with only Tessera's own limits may use any model.
            gpus_by_model: match (limits.quota, limits.memory_mib, limits.percent, &limits.guaranteed) {
                (None, None, None, None) => Some(BTreeMap::new()),
                (gpus, ..) => gpus,
            },
            pools: limits.pool.unwrap_or_default(),
            memory: limits.memory_mib.map(MiB),
            compute_percent: limits.percent,
            guarantee: limits.guaranteed.map(|guaranteed| Guarantee {
                memory: guaranteed.memory_mib.map(MiB),
                compute_percent: guaranteed.percent,
            }),
        }
    }
}

fn default_name() -> String {
    "gpuquota".to_owned()
}

fn default_namespace() -> String {
    "kube-system".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Quota, BadQuota> {
        super::parse(json, "key gpu_quota of ConfigMap kube-system/gpuquota")
    }

    #[test]
    fn invalid_limits_affect_only_their_namespace() {
        let check = |entry: &str, why: &str| {
            let quota = parse(&format!(r#"{{"team":{entry},"good":{{"percent":100}}}}"#)).unwrap();
            let said = quota.why_unreadable("team").unwrap();
            let begin = "the limits of namespace team in key gpu_quota of ConfigMap kube-system/gpuquota cannot be read: ";
            assert_eq!(said.strip_prefix(begin).and_then(|said| said.split_once("; write ")).unwrap().0, why);
            assert_eq!(quota.namespaces.keys().collect::<Vec<_>>(), ["good"]);
            assert_eq!(quota.why_unreadable("good"), None);
        };
        check(r#"{"quota":{"M40":"4"}}"#, r#"invalid type: string "4", expected u64"#);
        check(r#"{"percent":-1}"#, "invalid value: integer `-1`, expected u64");
        check("null", "invalid type: null, expected struct Namespace");
        check("400", "invalid type: integer `400`, expected struct Namespace");
        let misspelt =
            "unknown field `memoryMb`, expected one of `quota`, `pool`, `memoryMiB`, `percent`, `guaranteed`";
        check(r#"{"quota":{"M40":4},"memoryMb":1024}"#, misspelt);
        check(r#"{"guaranteed":{}}"#, "guaranteed names no amount: write percent, memoryMiB or both");
        check(r#"{"guaranteed":{"gpus":1}}"#, "unknown field `gpus`, expected `memoryMiB` or `percent`");
        check(
            r#"{"percent":400,"guaranteed":{"percent":500}}"#,
            "guaranteed.percent is 500, more than the limit percent of 400",
        );
    }

    #[test]
    fn parses_the_sample_of_gpu_admission() {
        let quota = parse(
            r#"{"default":{"pool":["public"],"quota":{"M40":4,"P100":4}},"B":{"pool":["wx"],"quota":{"M40":8,"P100":2}}}"#,
        )
        .unwrap();
        let limit = &quota.namespaces["B"];
        assert_eq!(limit.pools, ["wx"]);
        assert_eq!(limit.gpus_by_model.as_ref().unwrap()["M40"], 8);
        assert_eq!((limit.memory, limit.compute_percent), (None, None));
    }

    #[test]
    fn parses_empty_limits_and_limits_of_tessera() {
        let quota = parse(r#"{"none":{},"some":{"memoryMiB":1024,"percent":150}}"#).unwrap();
        assert_eq!(quota.namespaces["none"].gpus_by_model, Some(BTreeMap::new()));
        let some = &quota.namespaces["some"];
        assert_eq!(
            (&some.gpus_by_model, some.memory, some.compute_percent),
            (&None, Some(MiB(1024)), Some(150))
        );
    }

    #[test]
    fn a_guaranteed_part_alone_forbids_nothing() {
        let quota = parse(r#"{"team":{"guaranteed":{"percent":400,"memoryMiB":65536}}}"#).unwrap();
        let limit = &quota.namespaces["team"];
        assert_eq!((&limit.gpus_by_model, limit.memory, limit.compute_percent), (&None, None, None));
        let guarantee = Guarantee { memory: Some(MiB(65_536)), compute_percent: Some(400) };
        assert_eq!(quota.guarantee("team"), Some(guarantee));
    }

    #[test]
    fn settings_have_the_defaults_of_gpu_admission() {
        let settings = parse_settings(
            r#"{"GPUModelLabel":"gaia.tencent.com/gpu-model","GPUPoolLabel":"pool","SkipBindTime":300000}"#,
        )
        .unwrap();
        assert_eq!((settings.name.as_str(), settings.namespace.as_str()), ("gpuquota", "kube-system"));
        assert!(parse_settings("{}").unwrap_err().to_string().contains("missing field `GPUModelLabel`"));
        assert_eq!(settings.origin(), "key gpu_quota of ConfigMap kube-system/gpuquota");
        let nothing = parse("[]").unwrap_err().to_string();
        assert!(
            nothing
                .starts_with("key gpu_quota of ConfigMap kube-system/gpuquota cannot be read: invalid type")
        );
        assert!(nothing.contains(r#"; write {"<namespace>": {"quota": "#), "{nothing}");
    }
}
