//! Whether an expression of a claim or class can give different answers for two GPUs of one kind.
//!
//! Tessera does not evaluate CEL. It reads the words of an expression instead: if all of them are known, and none leads
//! to an attribute in which GPUs of one kind differ, the answer is the same for all of them. In doubt the answer may
//! differ.

/// Words that lead to nothing in which two GPUs of one kind differ: attributes and capacities of the kind, operators and
/// functions on their values. Macros over all attributes are not among them.
const HARMLESS: [&str; 33] = [
    "allowMultipleAllocations",
    "architecture",
    "attributes",
    "capacity",
    "compareTo",
    "contains",
    "cores",
    "cudaComputeCapability",
    "device",
    "dev",
    "driver",
    "driverVersion",
    "endsWith",
    "false",
    "gpu",
    "has",
    "in",
    "int",
    "isGreaterThan",
    "isLessThan",
    "isQuantity",
    "isSemver",
    "lowerAscii",
    "matches",
    "memory",
    "null",
    "productName",
    "quantity",
    "semver",
    "size",
    "startsWith",
    "string",
    "tessera",
];

/// Attributes in which two GPUs of one kind may differ, also as texts between quotes.
const TELLING: [&str; 6] = ["uuid", "index", "numaNode", "linkDomain", "pcieRoot", "pciBusID"];

/// Returns whether an expression certainly gives the same answer for all GPUs of one kind on one node.
pub(super) fn cannot_tell_apart(expression: &str) -> bool {
    // Escapes and sums of texts could spell the name of an attribute.
    if expression.contains(['\\', '+', '`']) {
        return false;
    }
    let mut quote: Option<char> = None;
    let mut word = String::new();
    let mut is_harmless = true;
    for c in expression.chars().chain([' ']) {
        match quote {
            Some(open) if c == open => {
                is_harmless &= !TELLING.iter().any(|name| word.contains(name));
                word.clear();
                quote = None;
            }
            Some(_) => word.push(c),
            None if c.is_ascii_alphanumeric() || c == '_' => word.push(c),
            None => {
                let is_number = word.starts_with(|c: char| c.is_ascii_digit());
                // Letters before a quote mark a text of another form, such as raw text.
                let is_prefix = !word.is_empty() && matches!(c, '"' | '\'');
                is_harmless &=
                    (word.is_empty() || is_number || HARMLESS.contains(&word.as_str())) && !is_prefix;
                word.clear();
                quote = matches!(c, '"' | '\'').then_some(c);
            }
        }
    }
    is_harmless && quote.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_about_the_kind_cannot_tell_gpus_apart() {
        for harmless in [
            "",
            r#"device.driver == "gpu.tessera.dev""#,
            r#"device.attributes["gpu.tessera.dev"].productName == "NVIDIA H100 80GB HBM3""#,
            r#"device.capacity['gpu.tessera.dev'].memory.compareTo(quantity("40Gi")) >= 0"#,
            r#"device.attributes["gpu.tessera.dev"].cudaComputeCapability.compareTo(semver("8.0.0")) >= 0"#,
        ] {
            assert!(cannot_tell_apart(harmless), "{harmless}");
        }
        for telling in [
            r#"device.attributes["gpu.tessera.dev"].uuid == "GPU-1""#,
            r#"device.attributes["gpu.tessera.dev"]["index"] == 3"#,
            r#"device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:01""#,
            r#"device.attributes["gpu.tessera.dev"].exists(name, name == "x")"#,
            r#"device.attributes["gpu.tessera.dev"]["in" + "dex"] == 3"#,
            r#"device.attributes["gpu.tessera.dev"]["\x75uid"] == "GPU-1""#,
            r#"device.attributes["gpu.tessera.dev"][r"x"] == 1"#,
            r#"device.driver == "unclosed"#,
            "a word that is not known",
        ] {
            assert!(!cannot_tell_apart(telling), "{telling}");
        }
    }
}
