//! The two writes that replace the GPUs of an allocated claim: an allocation cannot be changed, only cleared and set
//! anew. The claim is edited as JSON, so that fields that Tessera does not know stay as they are.

use serde_json::Value;
use tessera_core::claim::ClaimPart;

use super::{DRIVER, device_name};

/// Fields of the status that belong to an allocation.
const OF_ALLOCATION: [&str; 3] = ["allocation", "reservedFor", "devices"];

/// Returns the claim without its allocation, for the first write.
#[must_use]
pub fn cleared(claim: &Value) -> Value {
    let mut cleared = claim.clone();
    if let Some(status) = cleared.get_mut("status").and_then(Value::as_object_mut) {
        OF_ALLOCATION.iter().for_each(|field| drop(status.remove(*field)));
    }
    cleared
}

/// Returns the claim for the second write: `current` is the answer to the first one, `before` the claim as it was. Only
/// the devices and the identities of their shares differ from `before`. Returns `None` if `parts` do not have a GPU for
/// each device.
#[must_use]
pub fn reallocated(
    current: &Value,
    before: &Value,
    parts: &[ClaimPart],
    mut new_share_id: impl FnMut() -> String,
) -> Option<Value> {
    let mut allocation = before.pointer("/status/allocation")?.clone();
    let mut left: Vec<(&str, std::slice::Iter<'_, _>)> =
        parts.iter().map(|part| (part.request.as_str(), part.gpus.iter())).collect();
    for result in allocation.pointer_mut("/devices/results")?.as_array_mut()? {
        if result["driver"] != DRIVER {
            return None;
        }
        let request = result["request"].as_str()?.to_owned();
        let mut of_request = left.iter_mut().filter(|(name, _)| *name == request);
        let gpu = of_request.find_map(|(_, gpus)| gpus.next())?;
        result["device"] = device_name(*gpu).into();
        if result.get("shareID").is_some_and(|id| !id.is_null()) {
            result["shareID"] = new_share_id().into();
        }
    }
    if left.iter_mut().any(|(_, gpus)| gpus.next().is_some()) {
        return None;
    }
    let mut written = current.clone();
    written["status"]["allocation"] = allocation;
    written["status"]["reservedFor"] = before.pointer("/status/reservedFor")?.clone();
    Some(written)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tessera_core::grant::Hold;
    use tessera_core::units::GpuIndex;

    use super::*;

    #[test]
    fn only_devices_and_share_ids_change() {
        let before = json!({
            "metadata": {"name": "c", "uid": "u", "resourceVersion": "7"},
            "spec": {"devices": {}},
            "status": {
                "allocation": {
                    "allocationTimestamp": "2026-01-01T00:00:00Z", "nodeSelector": {"nodeSelectorTerms": []},
                    "devices": {"config": [{"source": "FromClass", "unknown": 1}], "results": [
                        {"request": "r", "driver": DRIVER, "pool": "n", "device": "gpu-0", "shareID": "a", "later": 2},
                        {"request": "r", "driver": DRIVER, "pool": "n", "device": "gpu-1"},
                    ]},
                },
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "p1"}], "devices": [],
            },
        });
        let mut current = cleared(&before);
        assert_eq!(current["status"], json!({}));
        current["metadata"]["resourceVersion"] = "8".into();
        let part = |gpus: &[u8]| ClaimPart {
            request: "r".to_owned(),
            gpus: gpus.iter().copied().map(GpuIndex).collect(),
            hold: Hold::Whole,
        };
        let after = reallocated(&current, &before, &[part(&[0, 3])], || "new".to_owned()).unwrap();
        let mut expected = before.clone();
        expected["metadata"]["resourceVersion"] = "8".into();
        expected["status"].as_object_mut().unwrap().remove("devices");
        let results = expected.pointer_mut("/status/allocation/devices/results").unwrap();
        results[0]["shareID"] = "new".into();
        results[1]["device"] = "gpu-3".into();
        assert_eq!(after, expected);
        for wrong in [&[0][..], &[0, 1, 2]] {
            assert_eq!(reallocated(&current, &before, &[part(wrong)], String::new), None);
        }
    }
}
