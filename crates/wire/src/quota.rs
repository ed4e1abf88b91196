//! gpu-admission's quota: its settings file, and the ConfigMap with the limits of each namespace.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_core::quota::{Limit, Quota};
use tessera_core::units::MiB;

/// The ConfigMap's key that holds the limits.
pub const DATA_KEY: &str = "gpu_quota";

/// The settings file, in gpu-admission's own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Settings {
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

/// Limits that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "expected {{\"<namespace>\": {{\"quota\": {{\"<model>\": <cards>}}, \"pool\": [\"<pool>\"], \"memoryMiB\": 65536, \"percent\": 400}}}}: {0}"
)]
pub struct BadQuota(#[from] serde_json::Error);

/// A settings file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("expected {{\"GPUModelLabel\": \"...\", \"GPUPoolLabel\": \"...\"}}: {0}")]
pub struct BadSettings(#[from] serde_json::Error);

#[derive(Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[derive(Default)]
struct Namespace {
    quota: Option<BTreeMap<String, u64>>,
    pool: Option<Vec<String>>,
    /// Ours: memory of all cards together.
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<u64>,
    /// Ours: compute of all cards together.
    percent: Option<u64>,
}

/// Reads the settings file.
pub fn parse_settings(json: &str) -> Result<Settings, BadSettings> {
    Ok(serde_json::from_str(json)?)
}

/// Reads the limits.
pub fn parse(json: &str) -> Result<Quota, BadQuota> {
    let namespaces: BTreeMap<String, Namespace> = serde_json::from_str(json)?;
    let limit = |namespace: Namespace| Limit {
        // A namespace with limits of ours only may use any model.
        cards: match (namespace.quota, namespace.memory_mib, namespace.percent) {
            (None, None, None) => Some(BTreeMap::new()),
            (cards, _, _) => cards,
        },
        pools: namespace.pool.unwrap_or_default(),
        memory: namespace.memory_mib.map(MiB),
        percent: namespace.percent,
    };
    let namespaces = namespaces.into_iter().map(|(name, found)| (name, limit(found))).collect();
    Ok(Quota { namespaces, is_unreadable: false })
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

    #[test]
    fn the_sample_of_the_original() {
        let quota = parse(
            r#"{"default":{"pool":["public"],"quota":{"M40":4,"P100":4}},"B":{"pool":["wx"],"quota":{"M40":8,"P100":2}}}"#,
        )
        .unwrap();
        let limit = &quota.namespaces["B"];
        assert_eq!(limit.pools, ["wx"]);
        assert_eq!(limit.cards.as_ref().unwrap()["M40"], 8);
        assert_eq!((limit.memory, limit.percent), (None, None));
    }

    #[test]
    fn a_namespace_with_nothing_allowed_and_one_with_limits_of_ours() {
        let quota = parse(r#"{"none":{},"some":{"memoryMiB":1024,"percent":150}}"#).unwrap();
        assert_eq!(quota.namespaces["none"].cards, Some(BTreeMap::new()));
        let some = &quota.namespaces["some"];
        assert_eq!((&some.cards, some.memory, some.percent), (&None, Some(MiB(1024)), Some(150)));
    }

    #[test]
    fn settings_with_the_original_defaults() {
        let settings = parse_settings(
            r#"{"GPUModelLabel":"gaia.tencent.com/gpu-model","GPUPoolLabel":"pool","SkipBindTime":300000}"#,
        )
        .unwrap();
        assert_eq!((settings.name.as_str(), settings.namespace.as_str()), ("gpuquota", "kube-system"));
        assert!(parse_settings("{}").unwrap_err().to_string().contains("missing field `GPUModelLabel`"));
        assert!(parse("[]").unwrap_err().to_string().starts_with("expected {\"<namespace>\""));
    }
}
