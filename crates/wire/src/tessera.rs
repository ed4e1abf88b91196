//! Formats that Tessera defines: annotations, configuration files and JSON answers.

pub mod agent_address;
pub mod certificate_expiry;
pub mod dra;
pub mod eviction;
pub mod excerpt;
pub mod explanation;
pub mod gang;
pub mod gpu_cordon;
pub mod gpu_wishes;
pub mod grant;
pub mod inventory;
pub mod memory_limit;
pub mod node_use;
pub mod page_rights;
pub mod parsed_node;
pub mod parsed_pod;
pub mod placed_pod;
pub mod preferences;
pub mod reservation;
pub mod rules;
pub mod static_table;
