"""Which of AWS' services has which operation, for doubles of `providers.eks.api.Aws` without boto3.

The names are those of botocore's clients; the tests in tests/contract/providers send the same calls through boto3.
"""

SERVICES = {
    "autoscaling": (
        *("describe_auto_scaling_groups", "describe_scaling_activities", "describe_scheduled_actions"),
        "put_scheduled_update_group_action",
    ),
    "cloudformation": ("create_stack", "delete_stack", "describe_stack_events", "describe_stacks"),
    "ec2": (
        *("create_launch_template", "create_placement_group", "delete_launch_template", "delete_network_interface"),
        *("delete_placement_group", "delete_security_group", "delete_vpc_endpoints", "describe_availability_zones"),
        *("describe_capacity_reservations", "describe_instance_type_offerings"),
        *("describe_instance_types", "describe_launch_templates", "describe_network_interfaces"),
        *("describe_placement_groups", "describe_regions", "describe_route_tables", "describe_security_groups"),
        *("describe_spot_price_history", "describe_subnets", "describe_volumes", "describe_vpc_attribute"),
        *("describe_vpc_block_public_access_options", "describe_vpc_endpoints", "describe_vpcs"),
        *("get_console_output", "revoke_security_group_egress", "revoke_security_group_ingress"),
    ),
    "ecr": (
        *("create_repository", "delete_repository", "describe_repositories", "get_authorization_token"),
        "list_tags_for_resource",
    ),
    "eks": (
        *("associate_access_policy", "create_access_entry", "create_addon", "create_cluster", "create_nodegroup"),
        *("delete_addon", "delete_cluster", "delete_nodegroup", "describe_addon", "describe_addon_versions"),
        *("describe_cluster", "describe_cluster_versions", "describe_nodegroup", "list_associated_access_policies"),
        *("list_clusters", "tag_resource", "update_nodegroup_config"),
    ),
    "elb": ("describe_load_balancers", "describe_tags"),
    "elbv2": ("describe_load_balancers", "describe_tags"),
    "iam": ("get_role", "simulate_principal_policy"),
    "pricing": ("get_products",),
    "service-quotas": ("get_service_quota",),
    "sts": ("get_caller_identity",),
}


def check_operation(service: str, operation: str) -> None:
    """Fail for an operation that the service does not have."""
    assert operation in SERVICES.get(service, ()), f"{service} has no operation {operation}"
