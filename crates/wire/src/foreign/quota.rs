//! gpu-admission's quota: its settings file, and the ConfigMap with the limits of each namespace.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tessera_core::quota::{NamespaceLimit, Quota, UnreadableLimits};
use tessera_core::units::MiB;

/// The ConfigMap's key that holds the limits.
pub const DATA_KEY: &str = "gpu_quota";

/// The settings file, in gpu-admission's own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct QuotaSettings {
    /// Name of the ConfigMap.
    #[serde(rename = "QuotaConfigMapName", default = "default_name")]
    pub name: String,
    /// Its namespace.
    #[serde(rename = "QuotaConfigMapNamespace", default = "default_namespace")]
    pub namespace: String,
    /// The node label that names the model.
    #[serde(rename = "GPUModelLabel")]
    pub model_label: String,
    /// The node label that names the pool.
    #[serde(rename = "GPUPoolLabel")]
    pub pool_label: String,
}

/// The limits of a namespace as they are written, for who has to mend them.
const EXPECTED: &str = r#"{"quota": {"<model>": 4}, "pool": ["<pool>"], "memoryMiB": 65536, "percent": 400}"#;

/// Limits of which nothing can be read.
#[derive(Debug, thiserror::Error)]
#[error("{home} cannot be read: {source}; write {{\"<namespace>\": {EXPECTED}}}")]
pub struct BadQuota {
    home: String,
    source: serde_json::Error,
}

/// A settings file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("expected {{\"GPUModelLabel\": \"...\", \"GPUPoolLabel\": \"...\"}}: {0}")]
pub struct BadQuotaSettings(#[from] serde_json::Error);

/// A word that is not known might be a limit that is not known: such an entry is not read as one without it.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Namespace {
    quota: Option<BTreeMap<String, u64>>,
    pool: Option<Vec<String>>,
    /// Ours: memory of all GPUs together.
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<u64>,
    /// Ours: compute of all GPUs together.
    percent: Option<u64>,
}

/// Reads the settings file.
pub fn parse_settings(json: &str) -> Result<QuotaSettings, BadQuotaSettings> {
    Ok(serde_json::from_str(json)?)
}

impl QuotaSettings {
    /// Where the limits are written, for who has to mend them.
    #[must_use]
    pub fn home(&self) -> String {
        format!("key {DATA_KEY} of ConfigMap {}/{}", self.namespace, self.name)
    }
}

/// Reads the limits that stand in `home`. A namespace whose limits cannot be read is told among them: they are its own affair.
pub fn parse(json: &str, home: &str) -> Result<Quota, BadQuota> {
    let bad = |source| BadQuota { home: home.to_owned(), source };
    let written: BTreeMap<String, Value> = serde_json::from_str(json).map_err(bad)?;
    let (mut namespaces, mut unreadable) = (BTreeMap::new(), BTreeMap::new());
    for (name, limits) in written {
        match Namespace::deserialize(limits) {
            Ok(limits) => {
                namespaces.insert(name, limits.into());
            }
            Err(error) => {
                let why = format!(
                    "the limits of namespace {name} in {home} cannot be read: {error}; write {EXPECTED}, or what of it is to be limited"
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
            // A namespace with limits of ours only may use any model.
            gpus_by_model: match (limits.quota, limits.memory_mib, limits.percent) {
                (None, None, None) => Some(BTreeMap::new()),
                (cards, _, _) => cards,
            },
            pools: limits.pool.unwrap_or_default(),
            memory: limits.memory_mib.map(MiB),
            compute_percent: limits.percent,
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
    fn an_entry_that_cannot_be_read_is_the_affair_of_its_namespace() {
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
        let misspelt = "unknown field `memoryMb`, expected one of `quota`, `pool`, `memoryMiB`, `percent`";
        check(r#"{"quota":{"M40":4},"memoryMb":1024}"#, misspelt);
    }

    #[test]
    fn the_sample_of_the_original() {
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
    fn a_namespace_with_nothing_allowed_and_one_with_limits_of_ours() {
        let quota = parse(r#"{"none":{},"some":{"memoryMiB":1024,"percent":150}}"#).unwrap();
        assert_eq!(quota.namespaces["none"].gpus_by_model, Some(BTreeMap::new()));
        let some = &quota.namespaces["some"];
        assert_eq!(
            (&some.gpus_by_model, some.memory, some.compute_percent),
            (&None, Some(MiB(1024)), Some(150))
        );
    }

    #[test]
    fn settings_with_the_original_defaults() {
        let settings = parse_settings(
            r#"{"GPUModelLabel":"gaia.tencent.com/gpu-model","GPUPoolLabel":"pool","SkipBindTime":300000}"#,
        )
        .unwrap();
        assert_eq!((settings.name.as_str(), settings.namespace.as_str()), ("gpuquota", "kube-system"));
        assert!(parse_settings("{}").unwrap_err().to_string().contains("missing field `GPUModelLabel`"));
        assert_eq!(settings.home(), "key gpu_quota of ConfigMap kube-system/gpuquota");
        let nothing = parse("[]").unwrap_err().to_string();
        assert!(
            nothing
                .starts_with("key gpu_quota of ConfigMap kube-system/gpuquota cannot be read: invalid type")
        );
        assert!(nothing.contains(r#"; write {"<namespace>": {"quota": "#), "{nothing}");
    }
}
