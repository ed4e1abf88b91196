//! The metric families of the pod-gpu map exporter: which pod holds which GPU.

use std::collections::{BTreeMap, BTreeSet};

use crate::metrics::{Labels, MetricKind::Info, MetricsPage, legal_name};

/// Pods with the GPUs they hold. Each pair occurs once, even if several containers share it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodGpuMap {
    /// Pairs by node.
    pairs: BTreeMap<String, BTreeSet<Labels>>,
}

/// A pod and a GPU that it holds.
#[derive(Clone, Copy, Debug)]
pub struct PodOnGpu<'a> {
    /// UUID of the GPU, which clients join with the metrics of other exporters.
    pub gpu_uuid: &'a str,
    /// Product name of the GPU.
    pub gpu_model: &'a str,
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Name of the node.
    pub node: &'a str,
    /// Name of the pod.
    pub pod: &'a str,
}

impl PodGpuMap {
    /// Adds a pair.
    pub fn insert(&mut self, pair: PodOnGpu<'_>) {
        let labels = Labels::new(&[
            ("gpu_id", pair.gpu_uuid),
            ("gpu_model", pair.gpu_model),
            ("namespace", pair.namespace),
            ("node", pair.node),
            ("pod_name", pair.pod),
        ]);
        self.pairs.entry(pair.node.to_owned()).or_default().insert(labels);
    }

    /// Writes the family `pod_and_gpu_map_info` with all pairs.
    pub fn write(&self, page: &mut MetricsPage) {
        let mut family =
            page.family("pod_and_gpu_map_info", Info, "Provide a mapping relationship between pod and gpu");
        self.pairs.values().flatten().for_each(|labels| family.sample(labels, 1u64));
    }

    /// Writes a family `<node>_info` for each node. Illegal characters of a name are replaced, and nodes
    /// with equal names after that share one family, because a page may have each family only once.
    pub fn write_by_node(&self, page: &mut MetricsPage) {
        let mut families: BTreeMap<String, Vec<&Labels>> = BTreeMap::new();
        for (node, pairs) in &self.pairs {
            families.entry(format!("{}_info", legal_name(node))).or_default().extend(pairs);
        }
        for (name, pairs) in families {
            let mut family =
                page.family(&name, Info, "Provide every node's pod and gpu mapping relationship");
            pairs.into_iter().for_each(|labels| family.sample(labels, 1u64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Format;

    const UUID: &str = "GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb61";

    fn map(pairs: &[(&str, &str)]) -> PodGpuMap {
        let mut map = PodGpuMap::default();
        for (node, pod) in pairs {
            map.insert(PodOnGpu { gpu_uuid: UUID, gpu_model: "2080ti", namespace: "default", node, pod });
        }
        map
    }

    fn text(write: impl Fn(&mut MetricsPage)) -> String {
        let mut page = MetricsPage::new(Format::Plain);
        write(&mut page);
        page.finish()
    }

    #[test]
    fn writes_the_documented_page_of_the_cluster() {
        let text = text(|page| map(&[("ti", "test"), ("ti2", "test2"), ("ti2", "test2")]).write(page));
        let line = |node: &str, pod: &str| {
            format!(
                "pod_and_gpu_map_info{{gpu_id=\"{UUID}\",gpu_model=\"2080ti\",namespace=\"default\",node=\"{node}\",pod_name=\"{pod}\"}} 1\n"
            )
        };
        assert!(text.ends_with(&(line("ti", "test") + &line("ti2", "test2"))), "{text}");
        assert!(
            text.contains("# HELP pod_and_gpu_map_info Provide a mapping relationship between pod and gpu\n")
        );
        assert!(text.contains("# TYPE pod_and_gpu_map_info gauge\n"), "{text}");
    }

    #[test]
    fn writes_one_family_for_each_node() {
        let text = text(|page| map(&[("ti", "test"), ("ti2", "test2")]).write_by_node(page));
        for name in ["ti_info", "ti2_info"] {
            assert!(text.contains(&format!("# TYPE {name} gauge\n")), "{text}");
            assert!(text.contains(&format!("\n{name}{{gpu_id=\"{UUID}\"")), "{text}");
        }
    }

    #[test]
    fn nodes_with_equal_legal_names_share_a_family() {
        let text = text(|page| map(&[("10.0.0.1", "a"), ("20.0.0.1", "b")]).write_by_node(page));
        assert_eq!(text.matches("# TYPE _0_0_0_1_info gauge\n").count(), 1, "{text}");
        assert!(text.contains("node=\"10.0.0.1\"") && text.contains("node=\"20.0.0.1\""), "{text}");
    }
}
