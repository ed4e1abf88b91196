//! The settings of shares that a claim or its class names, in a configuration for the driver.
//!
//! ```yaml
//! config:
//!   - opaque:
//!       driver: gpu.tessera.dev
//!       parameters: { apiVersion: gpu.tessera.dev/v1, kind: ShareConfig, coresLimit: 100 }
//! ```

use serde::Deserialize;
use tessera_core::units::Percent;

use super::DRIVER;
use crate::foreign::dra::ResourceClaim;
use crate::tessera::excerpt::excerpt;

/// Settings of the shares of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareConfig {
    /// Percentage of each GPU's time that the request may use while others leave it idle, or `None` if its `cores` are
    /// the upper bound.
    pub cores_limit: Option<Percent>,
}

/// A configuration that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the configuration for {DRIVER} is not valid: {0}; expected apiVersion gpu.tessera.dev/v1, kind ShareConfig, and \
     coresLimit from 1 to 100"
)]
pub struct BadShareConfig(String);

/// A field with a wrong name is an error, because the user would get other limits than expected.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    api_version: String,
    kind: String,
    #[serde(default)]
    cores_limit: Option<u32>,
}

/// Returns the settings of a request's shares, where `request` is `request` or `request/alternative`. Settings of the
/// claim come after those of the class, and the last ones count.
///
/// # Errors
/// Fails if a configuration for this driver cannot be parsed.
pub fn share_config(claim: &ResourceClaim, request: &str) -> Result<ShareConfig, BadShareConfig> {
    let main = request.split_once('/').map_or(request, |(main, _)| main);
    let mut found = ShareConfig::default();
    let configs = claim.status.allocation.iter().flat_map(|allocation| &allocation.devices.config);
    for config in configs {
        let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let document: Document = serde_json::from_value(opaque.parameters.clone())
            .map_err(|error| BadShareConfig(excerpt(error.to_string())))?;
        if (document.api_version.as_str(), document.kind.as_str()) != ("gpu.tessera.dev/v1", "ShareConfig") {
            let kind = format!("it is {} of {}", document.kind, document.api_version);
            return Err(BadShareConfig(excerpt(kind)));
        }
        let cores_limit = match document.cores_limit {
            Some(percent @ (0 | 101..)) => return Err(BadShareConfig(format!("coresLimit is {percent}"))),
            limit => limit.map(Percent),
        };
        if config.requests.is_empty() || config.requests.iter().any(|name| name == request || name == main) {
            found = ShareConfig { cores_limit };
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(configs: &[(&[&str], Value)]) -> ResourceClaim {
        let config = |(requests, parameters): &(&[&str], Value)| json!({ "requests": requests, "opaque": { "driver": DRIVER, "parameters": parameters } });
        let mut configs: Vec<Value> = configs.iter().map(config).collect();
        configs.push(json!({ "opaque": { "driver": "other", "parameters": { "kind": "Any" } } }));
        let allocation = json!({ "devices": { "config": configs } });
        serde_json::from_value(json!({ "status": { "allocation": allocation } })).unwrap()
    }

    fn limit(percent: u32) -> Value {
        json!({ "apiVersion": "gpu.tessera.dev/v1", "kind": "ShareConfig", "coresLimit": percent })
    }

    #[test]
    fn the_last_configuration_of_a_request_counts() {
        let claim = claim(&[(&[], limit(50)), (&["a"], limit(80)), (&["b/any"], limit(100))]);
        let limits = ["a", "b/any", "b/other", "c"]
            .map(|request| share_config(&claim, request).unwrap().cores_limit.unwrap().0);
        assert_eq!(limits, [80, 100, 50, 50]);
        assert_eq!(share_config(&self::claim(&[]), "a"), Ok(ShareConfig::default()));
    }

    #[test]
    fn a_configuration_that_means_nothing_is_an_error() {
        let v1 = "gpu.tessera.dev/v1";
        for (bad, why) in [
            (limit(0), "coresLimit is 0"),
            (limit(101), "coresLimit is 101"),
            (json!({ "apiVersion": v1, "kind": "GpuConfig" }), "it is GpuConfig of"),
            (json!({ "apiVersion": v1, "kind": "ShareConfig", "coreLimit": 5 }), "unknown field `coreLimit`"),
            (json!("x".repeat(10_000)), "invalid type"),
        ] {
            let error = share_config(&claim(&[(&["other"], bad)]), "a").unwrap_err().to_string();
            assert!(error.contains(why) && error.chars().count() < 1_000, "{error}");
        }
    }
}
