//! Resources that another device plugin of the node serves already, such as `nvidia.com/gpu` by NVIDIA's plugin. The
//! kubelet uses the plugin that registered last, so two of them would take the devices from each other.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tessera_node::pod_resources::PodResources;
use tessera_wire::foreign::dialect::Dialect;
use tessera_wire::kubelet::device_id::Resource;

/// Time after which the kubelet has noticed the end of the agent before this one. Its devices are unhealthy then.
const AGENT_END: Duration = Duration::from_secs(3);

/// Returns the dialects whose resources no other plugin serves, and the others. Logs the others.
pub(super) async fn left_to_us(dialects: &[Dialect], socket: &Path) -> (Vec<Dialect>, Vec<Dialect>) {
    let offered = async || match PodResources::at(socket) {
        // A kubelet that does not answer has no plugin that could be disturbed.
        Ok(kubelet) => kubelet.offered().await.unwrap_or_default(),
        Err(_) => BTreeMap::new(),
    };
    let (mut left, mut taken) = divide(dialects, &offered().await);
    if !taken.is_empty() {
        tokio::time::sleep(AGENT_END).await;
        (left, taken) = divide(dialects, &offered().await);
    }
    for resource in taken {
        tracing::warn!(
            resource = resource.name(),
            "another device plugin of this node serves this resource, so the agent leaves it alone and serves the \
             others; remove that plugin and restart the agent, or leave this dialect out of --dialects"
        );
    }
    let others = dialects.iter().copied().filter(|dialect| !left.contains(dialect)).collect();
    (left, others)
}

/// Divides dialects into those that are left, and the resources that others offer.
fn divide<V>(dialects: &[Dialect], offered: &BTreeMap<String, V>) -> (Vec<Dialect>, Vec<Resource>) {
    let taken =
        |dialect: &Dialect| Resource::of(*dialect).find(|resource| offered.contains_key(resource.name()));
    let left = dialects.iter().copied().filter(|dialect| taken(dialect).is_none()).collect();
    (left, dialects.iter().filter_map(taken).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_of_another_plugin_is_left_alone() {
        let all = [Dialect::Nvidia, Dialect::Gpushare, Dialect::Vcuda];
        let offered = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), ())).collect();
        assert_eq!(divide(&all, &offered(&["nvidia.com/mig-1g.10gb"])), (all.to_vec(), Vec::new()));
        let (left, taken) = divide(&all, &offered(&["nvidia.com/gpu", "example.com/nic"]));
        assert_eq!((left, taken), (vec![Dialect::Gpushare, Dialect::Vcuda], vec![Resource::NvidiaGpu]));
        let (left, taken) = divide(&all, &offered(&["tencent.com/vcuda-memory"]));
        assert_eq!((left, taken), (vec![Dialect::Nvidia, Dialect::Gpushare], vec![Resource::VcudaMemory]));
    }
}
