//! Formats that Tessera defines: annotations, configuration files and JSON answers.

pub mod agent_address;
pub mod explanation;
pub mod grant;
pub mod inventory;
pub mod node_use;
pub mod page_rights;
pub mod parsed_node;
pub mod parsed_pod;
pub mod placed_pod;
pub mod preferences;
pub mod rules;
pub mod static_table;
