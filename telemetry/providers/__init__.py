"""Where figures come from: one provider per source, each with sensors that are read in tiers.

Sensors, by the names that runs know them by (a machine lacks some of them, and says why):

`nvml.` fast: `memory_used_bytes memory_free_bytes memory_reserved_bytes memory_total_bytes
gpu_utilization_percent memory_utilization_percent power_mw energy_mj sm_clock_mhz
clock_event_reasons_bits`; slow: `temperature_c memory_temperature_c memory_clock_mhz
throttled_by_power_cap_ns throttled_by_sync_boost_ns throttled_by_thermal_sw_ns
throttled_by_thermal_hw_ns throttled_by_power_brake_ns`; at windows' edges:
`process_memory_bytes other_processes_memory_bytes ecc_corrected_count ecc_uncorrected_count
remapped_rows_count`.

`host.` fast: `rss_bytes shared_bytes cpu_ns gc_pause_ns gc_collections_count`; slow:
`minor_faults_count major_faults_count voluntary_switches_count involuntary_switches_count
threads_count available_bytes memory_used_bytes memory_limit_bytes energy_uj`.

`torch.` at windows' edges: `allocated_bytes allocated_peak_bytes reserved_bytes
inactive_split_bytes requested_bytes graph_pools_bytes allocation_retries_count`.

Nothing here makes a CUDA call: one from another thread breaks the capture of a graph.
"""
